#include "exec/workers.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <system_error>

#include "exec/ranges.hpp"

namespace pykern {

namespace {

// An action expected to take less runs on the thread that released it. Waking another thread and
// sharing the interpreter with it costs tens of microseconds, so nothing shorter gains from a
// second thread.
constexpr std::int64_t kWorthWakingNs = 150'000;

// The workers that this thread belongs to; null for most threads.
thread_local const Workers* workers_of_this_thread = nullptr;

void name_this_thread(int worker) {
    const std::string name = "pykern dev" + std::to_string(worker);
    pthread_setname_np(pthread_self(), name.substr(0, 15).c_str());
    name_thread(name.c_str());
}

}  // namespace

bool run_timed(WorkerProgram& job, Client& client, int worker, Position position) {
    const Action action = job.program.action(position);
    const Range range(action, job.program.device_of(position));
    const std::int64_t start = now_ns();
    const bool ok = client.run(worker, position);
    const std::int64_t end = now_ns();
    // One that failed was cut short, or did not even start: its time says nothing.
    if (ok) {
        job.trace.record(position, start, end);
        job.pace.observe(action, end - start);
    }
    return ok;
}

// Actions that this thread will run itself. Last in first out, so that it follows the data; its own
// row waits until the short actions of others, which may free further devices, are done. Where
// there are rows, at most one entry per device, so it does not grow.
class Workers::Ready {
   public:
    explicit Ready(std::size_t num_devices) { positions_.reserve(num_devices); }
    void push(Position position) { positions_.push_back(position); }
    void push_last(Position position) { positions_.insert(positions_.begin(), position); }
    bool empty() const { return positions_.empty(); }
    Position pop() {
        const Position position = positions_.back();
        positions_.pop_back();
        return position;
    }

   private:
    std::vector<Position> positions_;
};

Workers::Workers(int num_workers, Client& client)
    : client_(client), entered_(static_cast<std::size_t>(num_workers), 0) {
    for (int worker = 0; worker < num_workers; ++worker) {
        mailboxes_.push_back(std::make_unique<Mailbox>());
    }
    start();
}

void Workers::start() {
    const std::size_t num_workers = mailboxes_.size();
    try {
        while (threads_.size() < num_workers) {
            threads_.emplace_back(
                [this, worker = static_cast<int>(threads_.size())] { loop(worker); });
        }
    } catch (const std::system_error& error) {
        const std::size_t num_started = threads_.size();
        begin_to_close();
        // A thread that is not joined ends the process.
        join();
        throw std::runtime_error(
            "each device needs a thread, and the system refused that of device " +
            std::to_string(num_started) + " of " + std::to_string(num_workers) + ": " +
            error.code().message() +
            ". Use fewer devices, close other pipelines, or raise the limit of threads (ulimit -u, "
            "pids.max of the container) or of memory (ulimit -v)");
    }
}

void Workers::join() {
    for (auto& mailbox : mailboxes_) {
        const std::scoped_lock lock(mailbox->mutex);
        mailbox->close = true;
        mailbox->filled.notify_one();
    }
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
}

std::vector<Workers::Waiting> Workers::waiting(const std::vector<Position>& under_way) const {
    const Program& program = job_->program;
    std::vector<Waiting> found;
    if (program.is_endless()) return found;
    std::vector<bool> waits(program.num_actions(), false);
    for (int device = 0; device < program.num_devices(); ++device) {
        Position next = program.row_begin(device);
        const auto is_begun = [&](Position position) {
            return job_->trace.has_run(position) || std::ranges::count(under_way, position) > 0;
        };
        while (next < program.row_begin(device + 1) && is_begun(next)) ++next;
        if (next == program.row_begin(device + 1)) continue;
        found.push_back({next, {}});
        waits[next] = true;
    }
    for (Position input = 0; input < program.num_actions(); ++input) {
        if (job_->trace.has_run(input)) continue;
        for (const Position next : program.releases(input)) {
            if (!waits[next]) continue;
            std::ranges::find(found, next, &Waiting::position)->inputs.push_back(input);
        }
    }
    return found;
}

void Workers::abandon() {
    begin_to_close();
    for (auto& mailbox : mailboxes_) {
        const std::scoped_lock lock(mailbox->mutex);
        mailbox->leave = true;
        mailbox->close = true;
        mailbox->filled.notify_one();
    }
    for (std::thread& thread : threads_) thread.detach();
    threads_.clear();
}

void Workers::renew() {
    const std::scoped_lock running(run_mutex_);
    if (closed()) return;
    join();
    // Nobody else looks at it without threads.
    for (auto& mailbox : mailboxes_) mailbox->close = false;
    start();
}

bool Workers::is_worker() const { return workers_of_this_thread == this; }

void Workers::run(WorkerProgram& job, const std::function<bool()>& interrupted,
                  const std::function<void()>& begun) {
    const std::scoped_lock running(run_mutex_);
    if (closing_.load(std::memory_order_relaxed)) return;
    const Range range = Range::of_step();
    job_ = &job;
    job.trace.begin();
    const Program& program = job.program;
    if (waiting_for_.size() < program.num_actions()) {
        waiting_for_ = std::vector<std::atomic<int>>(program.num_actions());
    }
    std::vector<Position> first;
    for (Position position = 0; position < program.num_actions(); ++position) {
        // Relaxed: the mailbox mutex, taken by post, publishes these to the workers.
        const int num_inputs = program.num_first_inputs(position);
        waiting_for_[position].store(num_inputs, std::memory_order_relaxed);
        if (num_inputs == 0) first.push_back(position);
    }
    // One more as long as it may be fed.
    const int num_unfinished = static_cast<int>(first.size()) + (program.is_endless() ? 1 : 0);
    unfinished_.store(num_unfinished, std::memory_order_relaxed);
    stopped_.store(false, std::memory_order_relaxed);
    {
        const std::scoped_lock lock(done_mutex_);
        finished_ = false;
        endless_ = program.is_endless();
    }
    for (const Position position : first) post(position);
    begun();
    wait_for_step(interrupted);
    call_out();
    job.trace.end();
    // An endless program has spans of its last batches alone, and one that issues has no times of
    // actions.
    if (TorchRange::misses_workers() && !program.is_endless() && !program.is_issuing())
        TorchRange::tell(job.trace.timeline(program, 0));
}

void Workers::wait_for_step(const std::function<bool()>& interrupted) {
    std::unique_lock lock(done_mutex_);
    const auto woken = [this] { return finished_ || (endless_ && stopped()); };
    while (!finished_) {
        if (!done_.wait_for(lock, kInterruptTick, woken)) {
            lock.unlock();
            if (interrupted()) stopped_.store(true, std::memory_order_relaxed);
            lock.lock();
        }
        if (endless_ && stopped()) {
            endless_ = false;
            finished_ = unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1;
        }
    }
}

void Workers::feed(const WorkerProgram& job, int slot) {
    // Held, so that the step does not end in between.
    const std::scoped_lock lock(done_mutex_);
    if (!endless_ || job_ != &job) return;
    const Position position = job.program.entry(slot);
    if (!is_ready(position)) return;
    unfinished_.fetch_add(1, std::memory_order_relaxed);
    post(position);
}

void Workers::stop(const WorkerProgram& job) {
    const std::scoped_lock lock(done_mutex_);
    if (!endless_ || job_ != &job) return;
    stopped_.store(true, std::memory_order_relaxed);
    done_.notify_all();
}

// Relaxed: these only keep further actions from starting; nothing is read through them.
bool Workers::stopped() const {
    return stopped_.load(std::memory_order_relaxed) || closing_.load(std::memory_order_relaxed);
}

void Workers::fail() {
    const std::scoped_lock lock(done_mutex_);
    stopped_.store(true, std::memory_order_relaxed);
    done_.notify_all();
}

// Has every worker that entered the step leave it.
void Workers::call_out() {
    {
        const std::scoped_lock lock(done_mutex_);
        num_inside_ = static_cast<int>(std::ranges::count(entered_, 1));
    }
    for (std::size_t worker = 0; worker < entered_.size(); ++worker) {
        // A worker clears its flag before it counts itself out, and none enters between steps.
        if (entered_[worker] == 0) continue;
        Mailbox& mailbox = *mailboxes_[worker];
        const std::scoped_lock lock(mailbox.mutex);
        mailbox.leave = true;
        mailbox.filled.notify_one();
    }
    std::unique_lock lock(done_mutex_);
    done_.wait(lock, [this] { return num_inside_ == 0; });
}

void Workers::begin_to_close() {
    // Relaxed: ordered before the next run by run_mutex_; a running step may see it late.
    closing_.store(true, std::memory_order_relaxed);
}

void Workers::close() {
    begin_to_close();
    const std::scoped_lock running(run_mutex_);
    join();
}

void Workers::loop(int worker) {
    name_this_thread(worker);
    workers_of_this_thread = this;
    client_.attach(worker);
    Mailbox& mailbox = *mailboxes_[static_cast<std::size_t>(worker)];
    for (;;) {
        std::unique_lock lock(mailbox.mutex);
        mailbox.filled.wait(
            lock, [&] { return !mailbox.posted.empty() || mailbox.leave || mailbox.close; });
        if (!mailbox.posted.empty()) {
            const Position position = mailbox.posted.front();
            mailbox.posted.pop_front();
            lock.unlock();
            run_ready(worker, position);
        } else if (mailbox.leave) {
            mailbox.leave = false;
            lock.unlock();
            leave(worker);
            const std::scoped_lock done_lock(done_mutex_);
            --num_inside_;
            done_.notify_all();
        } else {
            break;
        }
    }
    client_.detach(worker);
}

void Workers::run_ready(int worker, Position first) {
    Ready ready(mailboxes_.size());
    ready.push(first);
    while (!ready.empty()) {
        const Position position = ready.pop();
        if (run_action(worker, position)) release(worker, position, ready);
        // acq_rel: the last one out has seen every write of the others, and passes all of it to the
        // caller through done_mutex_. After finish the step may be gone, so nothing of it is
        // touched; `ready` is empty then, because its entries count as unfinished.
        if (unfinished_.fetch_sub(1, std::memory_order_acq_rel) == 1) finish(worker);
    }
}

// True when the action ran and its successors may run too.
bool Workers::run_action(int worker, Position position) {
    if (stopped()) return false;
    client_.resume(worker);
    auto& entered = entered_[static_cast<std::size_t>(worker)];
    bool ok = true;
    if (entered == 0) {
        entered = 1;
        ok = client_.enter(worker);
    }
    ok = ok && run_timed(*job_, client_, worker, position);
    client_.suspend(worker);
    if (!ok) fail();
    return ok;
}

//   F(s, m) ──► F(s, m+1)   the next in the row
//      └──────► F(s+1, m)   an action of another device, waiting for its own row as well
//
// Two workers may take inputs of one action away at the same time. acq_rel on the counter makes the
// one that reaches zero see what the other wrote before, and only that one touches the action
// afterwards.
bool Workers::is_ready(Position position) {
    auto& waiting_for = waiting_for_[position];
    if (waiting_for.fetch_sub(1, std::memory_order_acq_rel) != 1) return false;
    // For the next round of an endless program, whose inputs come after this one has run.
    waiting_for.store(job_->program.num_inputs(position), std::memory_order_relaxed);
    return true;
}

void Workers::release(int worker, Position position, Ready& ready) {
    const Program& program = job_->program;
    for (const Position next : program.releases(position)) {
        if (!is_ready(next)) continue;
        // Relaxed: this action is itself unfinished until its releases are counted.
        unfinished_.fetch_add(1, std::memory_order_relaxed);
        if (may_stay(worker, next)) {
            ready.push(next);
        } else if (program.device_of(next) == worker && !program.is_endless()) {
            ready.push_last(next);
        } else {
            post(next);
        }
    }
}

// Whether an action that is not of the worker's row runs there all the same, where it was released.
bool Workers::may_stay(int worker, Position position) const {
    const Program& program = job_->program;
    if (program.is_issuing()) return !program.is_in_row(position);
    return program.device_of(position) != worker &&
           job_->pace.expected_ns(program.action(position)) < kWorthWakingNs;
}

void Workers::post(Position position) {
    const auto device = static_cast<std::size_t>(job_->program.device_of(position));
    Mailbox& mailbox = *mailboxes_[device];
    const std::scoped_lock lock(mailbox.mutex);
    mailbox.posted.push_back(position);
    mailbox.filled.notify_one();
}

void Workers::leave(int worker) {
    entered_[static_cast<std::size_t>(worker)] = 0;
    client_.resume(worker);
    client_.leave(worker);
    client_.suspend(worker);
}

// Called by the worker that dealt with the last action. It leaves at once, which saves a round
// trip.
void Workers::finish(int worker) {
    if (entered_[static_cast<std::size_t>(worker)] != 0) leave(worker);
    const std::scoped_lock lock(done_mutex_);
    finished_ = true;
    done_.notify_all();
}

}  // namespace pykern
