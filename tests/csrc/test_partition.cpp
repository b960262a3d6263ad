// SM groups of one device, on the fake driver, whose devices have 132 SMs in multiples of 8.
#include <doctest/doctest.h>

#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda/objects.hpp"
#include "cuda/partition.hpp"
#include "fake_world.hpp"

using namespace pykern::cuda;

TEST_CASE("a device is split once, into groups of one size") {
    for (const auto& [num_groups, num_sms] :
         {std::pair{1U, 128U}, {2U, 64U}, {3U, 40U}, {4U, 32U}, {16U, 8U}}) {
        CAPTURE(num_groups);
        const FakeWorld world(1);
        const Partition partition(0, num_groups);
        CHECK(partition.device() == 0);
        REQUIRE(partition.groups().size() == num_groups);
        std::set<CUcontext> contexts;
        for (const Group& group : partition.groups()) {
            CHECK(group.num_sms() == num_sms);
            contexts.insert(group.context());
        }
        CHECK(contexts.size() == num_groups);
        // The fake tells of SMs that are in two groups.
        CHECK(fake_calls("cuDevSmResourceSplitByCount") == 1);
    }
}

TEST_CASE("events are made under the context of the group on whose streams they are recorded") {
    const FakeWorld world(1);
    const PrimaryContext device(0);
    const CurrentContext mine(device.get());
    const Partition partition(0, 2);
    const Stream first = partition.groups()[0].make_stream();
    const Stream second = partition.groups()[1].make_stream();
    const Event event = make_event(partition.groups()[0].context(), kEventDisableTiming);
    driver::cuEventRecord(event.get(), first.get());
    driver::cuStreamWaitEvent(second.get(), event.get(), 0);
    driver::cuStreamSynchronize(second.get());
    CUcontext context = nullptr;
    driver::cuCtxGetCurrent(&context);
    CHECK(context == device.get());
}

TEST_CASE("a partition that does not fit is refused before anything is made") {
    const FakeWorld world(1);
    for (const unsigned num_groups : {0U, 17U, 133U}) {
        const std::string text =
            "cuda:0 cannot be split into " + std::to_string(num_groups) +
            " groups: its 132 SMs come in groups of 8 or more, in multiples of 8";
        CHECK_THROWS_WITH_AS(Partition(0, num_groups), text.c_str(), std::invalid_argument);
    }
    CHECK_THROWS_AS(Partition(1, 2), std::out_of_range);
    CHECK(fake_calls("cuDevSmResourceSplitByCount") == 0);
    CHECK(fake_calls("cuDevicePrimaryCtxRetain") == 0);
}

TEST_CASE("whichever call fails, its error comes out and nothing is left") {
    for (const char* function :
         {"cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevicePrimaryCtxRetain",
          "cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuCtxFromGreenCtx",
          "cuGreenCtxStreamCreate"}) {
        CAPTURE(function);
        fake_reset(1, 0);
        const auto run = [] {
            const Partition partition(0, 3);
            std::vector<Stream> streams;
            for (const Group& group : partition.groups()) streams.push_back(group.make_stream());
        };
        run();
        const auto num_calls = static_cast<int>(fake_calls(function));
        REQUIRE(num_calls > 0);
        for (int nth = 1; nth <= num_calls; ++nth) {
            CAPTURE(nth);
            const FakeWorld world(1);
            fake_fail(function, nth, kOutOfMemory, 0);
            const std::string text =
                std::string(function) + ": CUDA_ERROR_OUT_OF_MEMORY (2): out of memory";
            CHECK_THROWS_WITH_AS(run(), text.c_str(), CudaError);
        }
    }
}
