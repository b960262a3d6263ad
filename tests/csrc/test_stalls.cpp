#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exec/kept_lock.hpp"
#include "exec/watchdog.hpp"
#include "exec/workers.hpp"
#include "plan/text.hpp"
#include "plans.hpp"

using namespace pykern;
using namespace std::chrono_literals;

namespace {

// The exception that `interrupted` throws to give a step up.
class GivenUp : public std::exception {};

// One action does not end before it is let go.
class Hanging final : public Client {
   public:
    explicit Hanging(Position position) : hangs_at_(position) {}

    void attach(int /*worker*/) noexcept override { count(1); }
    void detach(int /*worker*/) noexcept override { count(-1); }
    void resume(int /*worker*/) noexcept override {}
    void suspend(int /*worker*/) noexcept override {}
    bool enter(int /*worker*/) noexcept override { return true; }
    void leave(int /*worker*/) noexcept override {}
    bool run(int /*worker*/, Position position) noexcept override {
        ++num_run;
        if (position != hangs_at_) return true;
        std::unique_lock lock(mutex_);
        inside = true;
        changed_.wait(lock, [this] { return may_go_; });
        return true;
    }

    void let_go() {
        const std::scoped_lock lock(mutex_);
        may_go_ = true;
        changed_.notify_all();
    }
    // Until so many threads are attached.
    void wait_for_threads(int number) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return num_attached_ == number; });
    }

    std::atomic<bool> inside{false};
    std::atomic<int> num_run{0};

   private:
    void count(int change) {
        const std::scoped_lock lock(mutex_);
        num_attached_ += change;
        changed_.notify_all();
    }

    Position hangs_at_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool may_go_ = false;   // guarded by mutex_
    int num_attached_ = 0;  // guarded by mutex_
};

Plan three_stages() {
    return plan_of(Placement::linear(3), 2,
                   {"0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"});
}

Position find(const Program& program, const std::string& text) {
    for (Position position = 0; position < program.num_actions(); ++position) {
        if (to_text(program.action(position)) == text) return position;
    }
    FAIL("the program does not hold ", text);
    return 0;
}

// Rows as "2F0: 1F0", the action and what it lacks.
std::vector<std::string> told(const Program& program, const std::vector<Workers::Waiting>& rows) {
    std::vector<std::string> lines;
    for (const Workers::Waiting& row : rows) {
        std::string& line = lines.emplace_back(to_text(program.action(row.position)) + ":");
        for (const Position input : row.inputs) line += " " + to_text(program.action(input));
    }
    return lines;
}

}  // namespace

TEST_CASE("workers that are given up end when they come back, and say what waits for what") {
    using Lines = std::vector<std::string>;
    for (int repetition = 0; repetition < 20; ++repetition) {
        WorkerProgram job(three_stages());
        const Position hangs = find(job.program, "1F0");
        const Position last = find(job.program, "0F1");
        Hanging client(hangs);
        Workers workers(3, client);
        const auto interrupted = [&]() -> bool {
            if (client.inside && job.trace.has_run(last)) throw GivenUp();
            return false;
        };
        CHECK_THROWS_AS(workers.run(job, interrupted), GivenUp);
        CHECK(client.num_run == 3);
        CHECK(&workers.program() == &job.program);
        CHECK(told(job.program, workers.waiting({hangs})) ==
              Lines{"0B0: 1B0", "1F1: 1F0", "2F0: 1F0"});
        CHECK(told(job.program, workers.waiting({})) == Lines{"0B0: 1B0", "1F0:", "2F0: 1F0"});

        workers.abandon();
        CHECK(workers.closed());
        // Those that are in no action end at once.
        client.wait_for_threads(1);
        workers.run(job, [] { return false; });
        CHECK(client.num_run == 3);
        client.let_go();
        client.wait_for_threads(0);
        CHECK(client.num_run == 3);
    }
}

TEST_CASE("nothing waits where everything has run, and an endless program has no rows") {
    WorkerProgram job(three_stages());
    Hanging client(static_cast<Position>(-1));
    Workers workers(3, client);
    workers.run(job, [] { return false; });
    WorkerProgram endless(Program::endless(Placement::linear(3), 2));
    std::thread stopper;
    workers.run(
        endless, [] { return false; },
        [&] { stopper = std::thread([&] { workers.stop(endless); }); });
    stopper.join();
    CHECK(workers.waiting({}).empty());
}

TEST_CASE("the message for a kept lock says who waits for whom") {
    const Program program(three_stages());
    const std::string text =
        tell_kept_lock(program, 2'000'000'000, {{find(program, "1F0"), 1'960'000'000, 0}},
                       {{find(program, "0F1"), {}},
                        {find(program, "2B1"), {find(program, "2F1"), find(program, "2B0")}}});
    CHECK(text.starts_with("pykern: a call in C has kept the interpreter lock for 2.0 s."));
    CHECK(text.find("\ndevice 1 is in stage 1, microbatch 0, action 1F0 for 2.0 s\n"
                    "device 0 waits for the lock or a worker, to go on with 0F1\n"
                    "device 2 waits for 2F1 of device 2, 2B0 of device 2, to go on with 2B1\n") !=
          std::string::npos);
    const Program endless = Program::endless(Placement::linear(2), 3);
    const std::string slots =
        tell_kept_lock(endless, 2'000'000'000, {{endless.entry(2), 0, 0}}, {});
    CHECK(
        slots.find("device 0 is in stage 0, slot 2 of the stream, action 0F2 for at most 2.0 s") !=
        std::string::npos);
    CHECK(tell_kept_lock(program, 1, {}, {}).find("another thread") != std::string::npos);
}

TEST_CASE("a watchdog tells of each wait that takes too long, once, and of no other") {
    std::array<int, 2> ends{};
    REQUIRE(pipe2(ends.data(), O_CLOEXEC) == 0);
    const auto read_all = [&](std::size_t size) {
        std::string text(size, '\0');
        for (std::size_t begin = 0; begin < size;) {
            const ssize_t count = read(ends[0], text.data() + begin, size - begin);
            REQUIRE(count > 0);
            begin += static_cast<std::size_t>(count);
        }
        return text;
    };
    // More than a pipe takes at once.
    const std::size_t size = 100'000;
    int number = 0;  // guarded by the wait, within which alone the message is made
    {
        Watchdog watchdog(1ms, ends[1], [&](std::int64_t ns) {
            CHECK(ns >= 1'000'000);
            return std::string(size, static_cast<char>('a' + number));
        });
        for (number = 0; number < 3; ++number) {
            const Watchdog::Wait wait(&watchdog);
            CHECK(read_all(size) == std::string(size, static_cast<char>('a' + number)));
        }
        Watchdog patient(1h, ends[1], [](std::int64_t) { return std::string("?"); });
        const Watchdog::Wait short_one(&patient);
        const Watchdog::Wait nobody_looks(nullptr);
    }
    close(ends[1]);
    char more = 0;
    CHECK(read(ends[0], &more, 1) == 0);
    close(ends[0]);
}
