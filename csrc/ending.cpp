#include "ending.hpp"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <mutex>
#include <new>
#include <set>
#include <stdexcept>
#include <thread>
#include <utility>

#include "exec/thread_numbers.hpp"
#include "interpreter_lock.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

using Clock = std::chrono::steady_clock;

// For how long the end of the program waits for a thread that has run a step, and now runs code of
// the user's.
constexpr std::chrono::milliseconds kToLeave{500};
// After that Python goes down, or handlers were run by hand and everything goes on.
constexpr std::chrono::seconds kToGoDown{5};
constexpr std::chrono::milliseconds kEndTick{1};

enum class Life : char {
    kRunning,
    kClosing,  // executors close; who has run a step may leave it
    kClosed,   // Python goes down next
};

// Relaxed everywhere: it keeps threads from going on; nothing is read through it.
std::atomic<Life> life{Life::kRunning};
std::atomic<pid_t> ender{0};

// Guarded by the interpreter lock.
std::vector<std::weak_ptr<Closable>> open;
bool is_registered = false;

// The threads that stay, and those that nobody joins and that are about to end. Leaked, since they
// outlive all destructors.
struct Staying {
    std::mutex mutex;
    std::set<pid_t> threads;
    std::set<pid_t> unjoined;
};
Staying& staying() {
    static auto* const all = new Staying;
    return *all;
}

bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing() != 0;
#else
    return _Py_IsFinalizing() != 0;
#endif
}

bool is_over() { return life.load(std::memory_order_relaxed) == Life::kClosed; }

// Without the interpreter lock.
void stay() {
    const pid_t self = this_thread_number();
    {
        const std::scoped_lock lock(staying().mutex);
        staying().threads.insert(self);
    }
    const auto begin = Clock::now();
    while (life.load(std::memory_order_relaxed) != Life::kRunning) {
        std::this_thread::sleep_for(kEndTick);
        if (!is_over() || is_finalizing() || Clock::now() - begin < kToGoDown) continue;
        life.store(Life::kRunning, std::memory_order_relaxed);
    }
    const std::scoped_lock lock(staying().mutex);
    staying().threads.erase(self);
}

// Until each of these threads stays, or is gone, or the time is over. Without the interpreter lock.
void wait_for(const std::set<pid_t>& threads) {
    const auto leaves = [](pid_t thread) {
        const std::scoped_lock lock(staying().mutex);
        return !staying().threads.contains(thread) && !is_gone(thread);
    };
    const auto deadline = Clock::now() + kToLeave;
    while (std::ranges::any_of(threads, leaves) && Clock::now() < deadline) {
        std::this_thread::sleep_for(kEndTick);
    }
}

void close_all() {
    life.store(Life::kClosing, std::memory_order_relaxed);
    ender.store(this_thread_number(), std::memory_order_relaxed);
    std::set<pid_t> callers;
    while (!open.empty()) {
        const auto closable = open.back().lock();
        open.pop_back();
        if (!closable) continue;
        closable->close_at_end();
        for (const pid_t caller : closable->callers()) callers.insert(caller);
    }
    callers.erase(this_thread_number());
    {
        // A thread that comes for the mutex later sees that executors close, and stays.
        const std::scoped_lock lock(staying().mutex);
        callers.merge(std::set(staying().unjoined));
    }
    const Unlocked unlocked;
    wait_for(callers);
    life.store(Life::kClosed, std::memory_order_relaxed);
}

// With atexit, until all of its handlers have been called.
void register_end() {
    const py::capsule end(&is_registered, [](void*) {
        is_registered = false;
        close_all();
    });
    // Nothing is to do in its turn.
    const py::cpp_function handler([](const py::object&) {});
    py::module_::import("atexit").attr("register")(handler, end);
    is_registered = true;
}

}  // namespace

void close_silently(const std::function<void()>& close) noexcept {
    try {
        close();
    } catch (py::error_already_set& error) {
        error.discard_as_unraisable("a pipeline that closes at exit");
        // The program ends from within a step, for which nobody can wait here.
        // NOLINTNEXTLINE(bugprone-empty-catch)
    } catch (const std::runtime_error&) {
    }
}

void close_before_end(const std::weak_ptr<Closable>& closable) {
    // To make the object, the thread has given the lock back for a while.
    stay_at_end();
    if (is_finalizing()) {
        throw std::runtime_error(
            "a pipeline cannot be made while Python goes down. Make it before the program ends");
    }
    if (!is_registered) register_end();
    // Made while no other thread can fork.
    static_cast<void>(staying());
    // Handlers were run by hand, or their destructors make a pipeline; which is closed as well.
    life.store(Life::kRunning, std::memory_order_relaxed);
    std::erase_if(open, [](const auto& each) { return each.expired(); });
    open.push_back(closable);
}

void stay_at_end() {
    if (life.load(std::memory_order_relaxed) == Life::kRunning) return;
    if (ender.load(std::memory_order_relaxed) == this_thread_number()) return;
    const Unlocked unlocked;
    stay();
}

void stay_after_end() {
    if (is_over()) stay_at_end();
}

void begin_anew_in_child() {
    life.store(Life::kRunning, std::memory_order_relaxed);
    ender.store(0, std::memory_order_relaxed);
    // Made anew without a destructor: a thread that stayed in the parent may hold the mutex.
    new (&staying()) Staying;
}

void end_unjoined() {
    {
        const std::scoped_lock lock(staying().mutex);
        std::erase_if(staying().unjoined, is_gone);
        staying().unjoined.insert(this_thread_number());
    }
    if (life.load(std::memory_order_relaxed) != Life::kRunning) stay();
}

}  // namespace pykern
