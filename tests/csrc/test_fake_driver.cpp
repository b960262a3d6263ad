#include <doctest/doctest.h>

#include <array>
#include <string>
#include <vector>

#include "fake_pair.hpp"

using namespace pykern;
using namespace pykern::cuda;

TEST_CASE("a ring slot written again before it was read is a race, in whichever order it ran") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        for (const bool waits : {true, false}) {
            FakePair pair(seed);
            for (int microbatch = 0; microbatch < 3; ++microbatch) {
                pair.send(waits);
                pair.receive();
            }
            CHECK(pair.violations_about("race") == (waits ? 0U : 2U));
            CHECK(pair.violations().size() == (waits ? 0U : 2U));
        }
    }
}

TEST_CASE("work runs when the host waits for it, and copies move bytes then") {
    FakePair pair(0);
    fake_set_eagerness(0);
    pair.source[0] = 7;
    pair.send(true);
    CHECK(pair.slot[0] == 0);
    CHECK(pair.api.cuEventQuery(pair.ready) == kNotReady);
    CHECK(pair.api.cuEventSynchronize(pair.ready) == kSuccess);
    CHECK(pair.slot[0] == 7);
    CHECK(pair.api.cuEventQuery(pair.ready) == kSuccess);
    CHECK(pair.violations().empty());
}

TEST_CASE("what the host waited for is before all that it issues later") {
    FakePair pair(3);
    pair.send(true);
    CHECK(pair.api.cuStreamSynchronize(pair.sender) == kSuccess);
    pair.touch_slot(pair.receiver, true);
    CHECK(pair.violations().empty());
}

TEST_CASE("completing a stream orders nothing") {
    FakePair pair(3);
    pair.send(true);
    fake_complete(pair.sender);
    pair.touch_slot(pair.receiver, true);
    CHECK(pair.violations_about("race") == 1);
}

TEST_CASE("memory is freed when all streams are before its owner's next work") {
    FakePair pair(1);
    pair.send(true);
    SUBCASE("the owner waited") {
        pair.receive();
        fake_free(address_of(pair.slot));
        CHECK(pair.violations().empty());
        pair.slot.fill(0);
    }
    SUBCASE("the owner did not wait") {
        fake_free(address_of(pair.slot));
        CHECK(pair.violations_about("freed while in use") == 1);
    }
    SUBCASE("work that comes after") {
        pair.receive();
        fake_free(address_of(pair.slot));
        pair.touch_slot(pair.receiver, false);
        CHECK(pair.violations_about("was freed") == 1);
        fake_alloc(address_of(pair.slot), sizeof pair.slot, pair.receiver);
        pair.touch_slot(pair.receiver, true);
        CHECK(pair.violations().size() == 1);
    }
    SUBCASE("an address that means something else") {
        pair.receive();
        fake_forget(address_of(pair.slot));
        CHECK(pair.violations_about("was not freed") == 1);
        fake_free(address_of(pair.slot));
        fake_forget(address_of(pair.slot));
        pair.touch_slot(pair.sender, true);
        CHECK(pair.violations_about("was never allocated") == 1);
        CHECK(pair.violations().size() == 2);
    }
}

TEST_CASE("copies of the wrong size, or of memory nobody declared") {
    FakePair pair(1);
    const CUdeviceptr slot = address_of(pair.slot);
    CHECK(pair.api.cuMemcpyAsync(slot + 4, address_of(pair.source), sizeof pair.slot,
                                 pair.sender) == kSuccess);
    CHECK(pair.violations_about("reaches out of the allocation") == 1);
    fake_reset(1, 0);  // before the copy runs: it would really write there
}

TEST_CASE("events wait for what was recorded last") {
    FakePair pair(5);
    const CUevent event = pair.make_event(pair.context[0], kEventDisableTiming);
    CHECK(pair.api.cuStreamWaitEvent(pair.receiver, event, 0) == kSuccess);
    CHECK(pair.violations_about("never recorded") == 1);
    CHECK(pair.api.cuEventRecord(event, pair.receiver) == 400);
    CHECK(pair.violations_about("another context") == 1);
    CHECK(pair.api.cuEventRecord(event, pair.sender) == kSuccess);
    CHECK(pair.api.cuStreamWaitEvent(pair.receiver, event, 0) == kSuccess);
    CHECK(pair.violations().size() == 2);
    fake_begin_step();
    CHECK(pair.api.cuStreamWaitEvent(pair.receiver, event, 0) == kSuccess);
    CHECK(pair.violations_about("not recorded in this step") == 1);
    CHECK(pair.api.cuEventDestroy(event) == kSuccess);
    CHECK(pair.api.cuEventQuery(event) == 400);
    CHECK(pair.violations_about("unknown or destroyed") == 1);
}

TEST_CASE("events tell virtual time") {
    FakePair pair(2);
    fake_set_copy_cost(1e6, 1e-6 * sizeof pair.slot);
    const CUevent start = pair.make_event(pair.context[0], kEventTimed);
    const CUevent end = pair.make_event(pair.context[0], kEventTimed);
    CHECK(pair.api.cuEventRecord(start, pair.sender) == kSuccess);
    pair.send(true);
    pair.send(true);
    CHECK(pair.api.cuEventRecord(end, pair.sender) == kSuccess);
    float milliseconds = 0;
    fake_run_all();
    CHECK(pair.api.cuEventElapsedTime(&milliseconds, start, end) == kSuccess);
    CHECK(milliseconds == 4);
    CHECK(pair.api.cuEventElapsedTime(&milliseconds, start, pair.ready) == 400);
}

TEST_CASE("ten thousand steps") {
    FakePair pair(4);
    for (int step = 0; step < 10000; ++step) {
        for (int microbatch = 0; microbatch < 4; ++microbatch) {
            pair.send(true);
            pair.receive();
        }
    }
    fake_run_all();
    CHECK(pair.violations().empty());
    CHECK(fake_calls("cuMemcpyAsync") == 40000);
}

TEST_CASE("a handle is used again where handles are to be, the last first") {
    for (const bool reuses : {false, true}) {
        FakePair pair(0);
        if (reuses) fake_reuse_handles();
        const CUevent first = pair.make_event(pair.context[0], kEventTimed);
        const CUevent second = pair.make_event(pair.context[0], kEventTimed);
        CHECK(pair.api.cuEventDestroy(first) == kSuccess);
        CHECK(pair.api.cuEventDestroy(second) == kSuccess);
        CHECK((pair.make_event(pair.context[0], kEventTimed) == second) == reuses);
        CHECK((pair.make_event(pair.context[0], kEventTimed) == first) == reuses);
    }
}
