#pragma once

#include <sys/syscall.h>
#include <unistd.h>

namespace pykern {

// Linux numbers threads. glibc has functions for that since 2.30, and wheels run on 2.28.
inline pid_t this_thread_number() noexcept { return static_cast<pid_t>(syscall(SYS_gettid)); }

// Whether no thread of this process has the number any more.
inline bool is_gone(pid_t thread) noexcept { return syscall(SYS_tgkill, getpid(), thread, 0) != 0; }

}  // namespace pykern
