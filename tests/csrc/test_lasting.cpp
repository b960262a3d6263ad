// Streams that go from user to user.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <thread>
#include <utility>

#include "cuda/device.hpp"
#include "cuda/lasting.hpp"
#include "fake_world.hpp"

using namespace pykern;        // NOLINT(google-build-using-namespace)
using namespace pykern::cuda;  // NOLINT(google-build-using-namespace)

namespace {

int num_created() { return static_cast<int>(fake_calls("cuStreamCreateWithPriority")); }

}  // namespace

TEST_CASE("a stream goes to the next user, the one that is idle for longest first") {
    const FakeWorld world(1);
    LastingStream one = take_stream(0, StreamUse::kCompute);
    LastingStream other = take_stream(0, StreamUse::kCompute);
    CUstream const first = one.get();
    CUstream const second = other.get();
    CHECK(first != second);
    one.reset();
    other.reset();
    const LastingStream again = take_stream(0, StreamUse::kCompute);
    const LastingStream later = take_stream(0, StreamUse::kCompute);
    CHECK(again.get() == first);
    CHECK(later.get() == second);
    CHECK(num_created() == 2);
}

TEST_CASE("a stream stays with its GPU and its use") {
    const FakeWorld world(2);
    CUstream const left = take_stream(0, StreamUse::kCompute).get();
    const LastingStream ring = take_stream(0, StreamUse::kRing);
    LastingStream elsewhere = take_stream(1, StreamUse::kCompute);
    CHECK(ring.get() != left);
    CHECK(elsewhere.get() != left);
    CHECK(num_created() == 3);
    CUstream const of_other = elsewhere.get();
    elsewhere.reset();
    const LastingStream again = take_stream(0, StreamUse::kCompute);
    const LastingStream further = take_stream(0, StreamUse::kCompute);
    CHECK(again.get() == left);
    CHECK(further.get() != of_other);
}

TEST_CASE("a stream goes on where no context is current") {
    const FakeWorld world(1);
    take_stream(0, StreamUse::kCompute).reset();
    std::thread([] { take_stream(0, StreamUse::kCompute).reset(); }).join();
    CHECK(num_created() == 1);
}

TEST_CASE("a stream that is lost is replaced") {
    const FakeWorld world(1);
    take_stream(0, StreamUse::kCopy).reset();
    fake_fail("cuStreamSynchronize", 1, 700, 0);
    take_stream(0, StreamUse::kCopy).reset();
    CHECK(num_created() == 2);
}

TEST_CASE("once the context is lost, no stream is handed out") {
    // Not a FakeWorld, because nothing can be ended any more.
    fake_reset(1, 0);
    take_stream(0, StreamUse::kCopy).reset();
    fake_fail("cuStreamSynchronize", 1, 700, 1);
    CHECK_THROWS_AS(take_stream(0, StreamUse::kCopy), CudaError);
}

TEST_CASE("a child after a fork takes no stream of its parent's, and leaves none") {
    const FakeWorld world(1);
    take_stream(0, StreamUse::kCompute).reset();
    LastingStream held = take_stream(0, StreamUse::kRing);
    const pid_t child = fork();
    if (child == 0) {
        held.reset();
        const LastingStream ring = take_stream(0, StreamUse::kRing);
        const LastingStream own = take_stream(0, StreamUse::kCompute);
        _exit(num_created());
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK(WEXITSTATUS(status) == 4);
    CHECK(num_created() == 2);
}
