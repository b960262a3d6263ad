// Interpreter lock: taken and given back by threads that Python may end.
//
// While Python goes down, it ends each other thread that asks for the lock, where the thread is:
// glibc unwinds it. In C++ the process ends with it, at the first function that may not throw, such
// as a destructor, and what is unwound frees Python objects without the lock. So such a thread
// stays where it is, for as long as the process lives, and disturbs nobody.
#pragma once

#include <cxxabi.h>
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <optional>

namespace pykern {

// Calls into Python, out of which a thread that Python has ended does not come back.
// The exception of glibc's unwinding has no object, so that the sanitizer of undefined behaviour
// takes the reference, which nothing reads, for one to null.
template <class Call>
__attribute__((no_sanitize("undefined"))) auto or_stay(const Call& call) {
    try {
        return call();
    } catch (const abi::__forced_unwind&) {
        for (;;) pause();
    }
}

// Without the lock as long as this lives. pybind11's own would end the process.
class [[nodiscard]] Unlocked {
   public:
    Unlocked() : state_(PyEval_SaveThread()) {}
    Unlocked(const Unlocked&) = delete;
    Unlocked& operator=(const Unlocked&) = delete;
    ~Unlocked() {
        or_stay([this] { PyEval_RestoreThread(state_); });
    }

   private:
    PyThreadState* state_;
};

// With the lock as long as this lives.
class [[nodiscard]] Locked {
   public:
    Locked() {
        or_stay([this] { lock_.emplace(); });
    }

   private:
    std::optional<pybind11::gil_scoped_acquire> lock_;
};

}  // namespace pykern
