#include "callbacks.hpp"

#include <pybind11/eval.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <utility>

#include "ending.hpp"
#include "interpreter_lock.hpp"

namespace py = pybind11;

namespace pykern {

namespace {

// Objects that go with a thread may leave others with it as they go.
constexpr int kRoundsOfGoodbyes = 8;

// For how long actions may go on behind a second interrupt, which they may be about to notice.
constexpr std::int64_t kGraceNs = 500'000'000;

// Frees what `threading.local` has of this thread, as long as all of Python works in it.
void clear_locals() {
    for (int round = 0; round < kRoundsOfGoodbyes; ++round) {
        const auto locals = py::reinterpret_borrow<py::object>(PyThreadState_GetDict());
        if (!locals || PyDict_Size(locals.ptr()) == 0) return;
        PyDict_Clear(locals.ptr());
    }
}

// In a child that has been forked within an action, whose thread is the only one. Nobody is there
// to end the step: what the action raised ends the process, as at the end of a program.
// The exit code of what a child has raised, which is printed where Python would print it.
int exit_code(py::error_already_set error) {
    if (error.matches(PyExc_SystemExit)) {
        const py::object code = error.value().attr("code");
        if (code.is_none()) return 0;
        if (py::isinstance<py::int_>(code)) return code.cast<int>();
        py::print(code, py::arg("file") = py::module_::import("sys").attr("stderr"));
        return 1;
    }
    error.restore();
    PyErr_Print();
    return 1;
}

// As multiprocessing ends its children: the interpreter cannot be finalized by a thread that Python
// has not made, and Python 3.13 crashes there.
[[noreturn]] void end_child(bool has_returned) noexcept {
    if (has_returned) {
        PyErr_SetString(PyExc_RuntimeError,
                        "a stage has forked this process and returned in it, where there is no "
                        "step to go on with: end the child within the stage, by os._exit");
    }
    int code = 1;
    try {
        code = exit_code(py::error_already_set());
        py::module_::import("threading").attr("_shutdown")();
        py::module_::import("atexit").attr("_run_exitfuncs")();
        py::module_::import("sys").attr("stdout").attr("flush")();
        py::module_::import("sys").attr("stderr").attr("flush")();
    } catch (...) {
        // A stream or a handler that fails: nobody is left to be told.
        code = code == 0 ? 120 : code;
    }
    _exit(code);
}

}  // namespace

Callbacks::Callbacks(int num_workers, std::int64_t timeout_ns, Watchdog* watchdog)
    : num_forks_(num_forks()),
      timeout_ns_(timeout_ns),
      watchdog_(watchdog),
      nothing_(py::eval("lambda: None", py::dict())),
      workers_(static_cast<std::size_t>(num_workers)) {}

void Callbacks::begin(const Program& program, CallsOfKinds calls, py::object carry) {
    program_ = &program;
    for (auto& [kind, of_kind] : calls) {
        calls_[static_cast<std::size_t>(kind)] = std::move(of_kind);
    }
    carry_ = std::move(carry);
    context_ = py::reinterpret_steal<py::object>(PyContext_CopyCurrent());
    if (!context_) throw py::error_already_set();
}

std::vector<Failure> Callbacks::end() {
    program_ = nullptr;
    for (auto& calls : calls_) calls.clear();
    carry_ = py::object();
    context_ = py::object();
    interrupted_ = false;
    num_interrupts_ = 0;
    return std::exchange(failures_, {});
}

bool Callbacks::check_signals(bool may_give_up) {
    if (watchdog_ != nullptr) look();
    std::optional<Watchdog::Wait> wait(std::in_place, watchdog_);
    const Locked lock;
    wait.reset();
    if (PyErr_CheckSignals() != 0) interrupt(fetch_exception());
    if (num_forks() != num_forks_) {
        throw std::runtime_error(
            "this process was forked by a signal handler within a step, which does not survive a "
            "fork. Make a new pipeline in the child");
    }
    if (may_give_up && is_hopeless()) throw Stalled();
    return interrupted_;
}

// By the thread that runs the step. Needs no interpreter lock.
void Callbacks::look() {
    const std::int64_t now = now_ns();
    for (Worker& worker : workers_) {
        if (!worker.acting.load(std::memory_order_relaxed)) continue;
        const std::uint64_t number = worker.number.load(std::memory_order_relaxed);
        if (worker.seen == number) continue;
        worker.seen = number;
        worker.since_ns = now;
    }
}

bool Callbacks::is_hopeless() {
    if (timeout_ns_ == 0 && num_interrupts_ == 0) return false;
    look();
    const std::int64_t now = now_ns();
    bool acts = false;
    bool late = false;
    for (const Worker& worker : workers_) {
        if (!worker.acting.load(std::memory_order_relaxed)) continue;
        acts = true;
        late = late || (timeout_ns_ > 0 && now - worker.since_ns > timeout_ns_);
    }
    return late || (acts && num_interrupts_ > 1 && now - last_interrupt_ns_ > kGraceNs);
}

std::vector<UnderWay> Callbacks::under_way() const {
    const std::int64_t now = now_ns();
    std::vector<UnderWay> found;
    for (const Worker& worker : workers_) {
        if (!worker.acting.load(std::memory_order_relaxed)) continue;
        const bool is_seen = worker.seen == worker.number.load(std::memory_order_relaxed);
        const std::int64_t ns = is_seen ? now - worker.since_ns : 0;
        found.push_back({worker.position.load(std::memory_order_relaxed), ns,
                         worker.thread_id.load(std::memory_order_relaxed)});
    }
    std::ranges::stable_sort(found, std::ranges::greater(), &UnderWay::ns);
    return found;
}

void Callbacks::abandon() {
    abandoned_ = true;
    interrupt_actions();
    for (const Worker& worker : workers_) {
        if (worker.acting.load(std::memory_order_relaxed)) worker.presence->give_up();
    }
}

void Callbacks::interrupt_actions() {
    for (const Worker& worker : workers_) {
        if (!worker.acting.load(std::memory_order_relaxed)) continue;
        PyThreadState_SetAsyncExc(worker.thread_id.load(std::memory_order_relaxed),
                                  PyExc_KeyboardInterrupt);
    }
}

void Callbacks::interrupt(py::object exception) {
    failures_.emplace_back(std::nullopt, -1, std::move(exception));
    interrupted_ = true;
    ++num_interrupts_;
    last_interrupt_ns_ = now_ns();
    interrupt_actions();
}

void Callbacks::attach(int worker) noexcept {
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    // One thread state for the life of the thread: a fresh one per call would cost 60 times as
    // much. PyThreadState_New counts as one PyGILState_Ensure without its release, so that those
    // within the actions never come down to 0, where they would delete the state.
    self.state = PyThreadState_New(PyInterpreterState_Main());
    if (self.state == nullptr) Py_FatalError("no memory for the thread state of a worker");
    self.presence = &Presence::of_this_thread();
}

void Callbacks::detach(int worker) noexcept {
    Callbacks::resume(worker);
    clear_locals();
    Presence::of_this_thread().leave();
    // Not by PyGILState_Release, which clears the state with the count at 0: where what goes then
    // takes the lock, as torch does to free a tensor, giving it back would delete the state that
    // is being cleared.
    PyThreadState_Clear(workers_[static_cast<std::size_t>(worker)].state);
    // Set with the lock, before the workers were told to end.
    const bool is_unjoined = abandoned_;
    PyThreadState_DeleteCurrent();
    if (is_unjoined) end_unjoined();
}

void Callbacks::resume(int worker) noexcept {
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    or_stay([&self] {
        PyEval_RestoreThread(self.state);
        self.presence->enter();
    });
}

void Callbacks::suspend(int worker) noexcept {
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    self.presence->leave();
    self.state = PyEval_SaveThread();
}

bool Callbacks::enter(int worker) noexcept {
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    self.thread_id.store(PyThread_get_thread_ident(), std::memory_order_relaxed);
    // A context is entered by one thread at a time, so each worker has a copy of the caller's.
    self.context = py::reinterpret_steal<py::object>(PyContext_Copy(context_.ptr()));
    if (!self.context || PyContext_Enter(self.context.ptr()) != 0) {
        self.context = py::object();
        return fail(std::nullopt, worker);
    }
    if (runs_on_caller()) return true;
    self.leave = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(carry_.ptr()));
    return self.leave ? true : fail(std::nullopt, worker);
}

void Callbacks::leave(int worker) noexcept {
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    if (self.leave) {
        const auto result =
            py::reinterpret_steal<py::object>(PyObject_CallNoArgs(self.leave.ptr()));
        if (!result) fail(std::nullopt, worker);
    }
    self.leave = py::object();
    if (self.context && PyContext_Exit(self.context.ptr()) != 0) fail(std::nullopt, worker);
    self.context = py::object();
}

bool Callbacks::run(int worker, Position position) noexcept {
    return static_cast<bool>(call(worker, position));
}

py::object Callbacks::call(int worker, Position position) {
    // While this worker waited for the lock another action failed, or an interrupt came, which
    // reaches only those under way.
    if (!failures_.empty() || abandoned_) return {};
    Worker& self = workers_[static_cast<std::size_t>(worker)];
    const Action action = program_->action(position);
    // An object of its own: the step may be given up meanwhile.
    const py::object function =
        calls_[static_cast<std::size_t>(action.kind)][program_->stage_of_replica(position)];
    const auto microbatch =
        py::reinterpret_steal<py::object>(PyLong_FromUnsignedLong(action.microbatch));
    self.position.store(position, std::memory_order_relaxed);
    self.number.store(self.number.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    self.acting.store(true, std::memory_order_relaxed);
    auto result = py::reinterpret_steal<py::object>(
        or_stay([&] { return PyObject_CallOneArg(function.ptr(), microbatch.ptr()); }));
    self.acting.store(false, std::memory_order_relaxed);
    if (abandoned_) {
        PyErr_Clear();
        take_interrupt();
        return {};
    }
    // The caller's thread can go on with the step, as with any call in which it has forked.
    if (num_forks() != num_forks_ && !runs_on_caller()) end_child(static_cast<bool>(result));
    if (!result) fail(action, program_->device_of(position));
    if (interrupted_) take_interrupt();
    return result;
}

// An interrupt meant for the action that just ended must not hit what this thread does next. It is
// let come here: where it is taken back by PyThreadState_SetAsyncExc, Pythons before 3.13 look for
// it for ever, which makes every thread slower, and endless where one is traced.
void Callbacks::take_interrupt() {
    const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(nothing_.ptr()));
    if (!result) PyErr_Clear();
}

bool Callbacks::fail(std::optional<Action> action, int device) {
    py::object exception = fetch_exception();
    // Once interrupted, what actions raise is the interrupt's echo.
    if (!interrupted_) failures_.emplace_back(action, device, std::move(exception));
    return false;
}

}  // namespace pykern
