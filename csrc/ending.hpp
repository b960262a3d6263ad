// Ending: executors end before the interpreter does.
//
// A thread that asks for the interpreter lock while Python goes down is ended there and then, and
// with it the process where the thread is in C++. So when everything registered with atexit has
// run, and before Python goes down, executors are closed, and threads that come from a step stay
// here. A handler may make a pipeline and run it: what closes all of them is not a handler of its
// own but the end of one, which atexit lets go of when it has called the last.
#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <vector>

namespace pykern {

// What has to be closed before the interpreter ends.
class Closable {
   public:
    Closable() = default;
    Closable(const Closable&) = delete;
    Closable& operator=(const Closable&) = delete;
    virtual ~Closable() = default;

    // Stops what runs and waits for its end. With the interpreter lock; leaves no exception.
    virtual void close_at_end() noexcept = 0;
    // The threads that have run something, by their numbers in the system.
    virtual std::vector<pid_t> callers() = 0;
};

// Calls what closes something at the end, and tells of an interrupt where Python tells of those
// that it cannot raise.
void close_silently(const std::function<void()>& close) noexcept;

// From now on it is closed before the interpreter ends. With the interpreter lock. Throws
// std::runtime_error when that has ended.
void close_before_end(const std::weak_ptr<Closable>& closable);

// For a thread that begins or feeds something, with the interpreter lock. While Python goes down it
// does not come back, except to the thread that takes Python down.
void stay_at_end();

// The same for a thread that comes from a step, which first may have some time to leave.
void stay_after_end();

}  // namespace pykern
