#include <doctest/doctest.h>

#include <array>
#include <string>

#include "fake_pair.hpp"

using namespace pykern;
using namespace pykern::cuda;

extern "C" int cuGetProcAddress_v2(const char* name, void** address, int version,
                                   std::uint64_t flags, int* status);

TEST_CASE("the nth call fails, once") {
    FakePair pair(0);
    const std::uint64_t before = fake_calls("cuEventRecord");
    fake_fail("cuEventRecord", 2, kOutOfMemory, 0);
    CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == kSuccess);
    CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == kOutOfMemory);
    CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == kSuccess);
    CHECK(fake_calls("cuEventRecord") == before + 3);
    CHECK(pair.violations().empty());
    fake_fail("cuMadeUp", 1, kOutOfMemory, 0);
    CHECK(pair.violations_about("no function cuMadeUp") == 1);
}

TEST_CASE("what gives back is done even if it fails") {
    FakePair pair(0);
    fake_fail("cuEventDestroy", 1, 719, 0);
    CHECK(pair.api.cuEventDestroy(pair.ready) == 719);
    CHECK(pair.api.cuEventDestroy(pair.ready) == 400);
}

TEST_CASE("after a sticky error work is lost, and no more may be issued") {
    FakePair pair(0);
    fake_set_eagerness(0);
    pair.source[0] = 7;
    pair.send(true);
    fake_fail("cuCtxSynchronize", 1, 700, 1);
    CHECK(pair.api.cuCtxSynchronize() == 700);
    CHECK(pair.api.cuEventSynchronize(pair.ready) == 700);
    fake_run_all();
    CHECK(pair.slot[0] == 0);
    fake_free(address_of(pair.slot));
    CHECK(pair.violations().empty());
    CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == 700);
    CHECK(pair.violations_about("work after the context was lost") == 1);
    const char* name = nullptr;
    CHECK(pair.api.cuGetErrorName(700, &name) == kSuccess);
    CHECK(std::string(name) == "CUDA_ERROR_ILLEGAL_ADDRESS");
    CHECK(pair.api.cuGetErrorName(123456, &name) == kInvalidValue);
}

TEST_CASE("what is left is told") {
    FakePair pair(0);
    const FakeAccess none{};
    CUgraph captured = fake_make_mix_graph(0, 0, &none, 0);
    CUgraphExec exec = nullptr;
    CHECK(pair.api.cuGraphInstantiateWithFlags(&exec, captured, 0) == kSuccess);
    const std::string leaks = fake_leaks();
    for (const char* kind :
         {"stream 0 on device 0\n", "event of device 1\n", "executable graph of 1 nodes\n",
          "primary context of device 1, retained 1 times\n"}) {
        CHECK(leaks.find(kind) != std::string::npos);
    }
    CHECK(leaks.find("\ngraph") == std::string::npos);
    pair.api.cuGraphExecDestroy(exec);
    for (CUevent event : {pair.ready, pair.free}) pair.api.cuEventDestroy(event);
    for (CUstream stream : {pair.sender, pair.receiver}) pair.api.cuStreamDestroy(stream);
    for (int device : {0, 1}) pair.api.cuDevicePrimaryCtxRelease(device);
    CHECK(std::string(fake_leaks()).empty());
    CHECK(pair.violations().empty());
}

TEST_CASE("a stream does not outlive its context, nor its own end") {
    FakePair pair(0);
    CHECK(pair.api.cuDevicePrimaryCtxRelease(0) == kSuccess);
    CHECK(pair.api.cuStreamSynchronize(pair.sender) == 709);
    CHECK(pair.violations_about("a context that is destroyed") == 1);
    pair.send(false);
    CHECK(pair.api.cuStreamDestroy(pair.receiver) == kSuccess);
    CHECK(pair.api.cuStreamDestroy(pair.receiver) == 400);
    CHECK(pair.violations_about("a stream that is unknown or destroyed") == 1);
    CHECK(pair.api.cuDevicePrimaryCtxRelease(0) == 201);
}

TEST_CASE("calls need a current context, and streams must not block") {
    FakePair pair(0);
    CHECK(pair.api.cuCtxSetCurrent(nullptr) == kSuccess);
    CHECK(pair.api.cuEventRecord(pair.ready, pair.sender) == 201);
    CHECK(pair.api.cuEventQuery(pair.ready) == 201);
    CHECK(pair.api.cuEventSynchronize(pair.ready) == 201);
    CHECK(pair.api.cuStreamSynchronize(pair.sender) == 201);
    CHECK(pair.violations_about("no context is current") == 4);
    CHECK(pair.api.cuCtxSetCurrent(pair.context[0]) == kSuccess);
    CUstream blocking = nullptr;
    CHECK(pair.api.cuStreamCreateWithPriority(&blocking, 0, 0) == kSuccess);
    CHECK(pair.violations_about("blocks on the default stream") == 1);
}

TEST_CASE("copies between devices that corrupt lose a byte, but not by way of the host") {
    FakePair pair(0);
    fake_set_corrupt(0, 1, 1);
    pair.source.fill(7);
    pair.send(true);
    fake_run_all();
    CHECK(pair.slot.back() == 0);
    CHECK(pair.slot.front() == 7);
    fake_place_on_host(address_of(pair.source), 1);
    pair.send(true);
    fake_run_all();
    CHECK(pair.slot.back() == 7);
}

TEST_CASE("copies without peer access go by the host") {
    FakePair pair(0);
    fake_set_peer(1, 0, 0);
    pair.send(true);
    CHECK(fake_staged_copies() == 1);
    CHECK(pair.api.cuCtxSetCurrent(pair.context[0]) == kSuccess);
    CHECK(pair.api.cuCtxEnablePeerAccess(pair.context[1], 0) == kSuccess);
    CHECK(pair.api.cuCtxEnablePeerAccess(pair.context[1], 0) == kPeerAccessAlreadyEnabled);
    pair.send(true);
    CHECK(fake_staged_copies() == 1);
    int can = 1;
    CHECK(pair.api.cuDeviceCanAccessPeer(&can, 1, 0) == kSuccess);
    CHECK(can == 0);
    CHECK(pair.api.cuCtxSetCurrent(pair.context[1]) == kSuccess);
    CHECK(pair.api.cuCtxEnablePeerAccess(pair.context[0], 0) == 217);
}

TEST_CASE("a device is split into groups of multiprocessors that are apart") {
    FakePair pair(0);
    DevResource whole{};
    CHECK(pair.api.cuDeviceGetDevResource(0, &whole, kResourceTypeSm) == kSuccess);
    CHECK(whole.sm.smCount == 132);
    std::array<DevResource, 3> groups{};
    unsigned num_groups = 3;
    DevResource rest{};
    CHECK(pair.api.cuDevSmResourceSplitByCount(groups.data(), &num_groups, &whole, &rest, 0, 60) ==
          kSuccess);
    CHECK(num_groups == 2);
    CHECK(groups[1].sm.smCount == 64);
    CHECK(rest.sm.smCount == 4);
    std::array<CUgreenCtx, 3> greens{};
    for (const std::size_t i : {0U, 1U, 0U}) {
        CUdevResourceDesc description = nullptr;
        CHECK(pair.api.cuDevResourceGenerateDesc(&description, &groups.at(i), 1) == kSuccess);
        CHECK(pair.violations().empty());
        CHECK(pair.api.cuGreenCtxCreate(&greens.at(i), description, 0, kGreenCtxDefaultStream) ==
              kSuccess);
    }
    CHECK(pair.violations_about("multiprocessors 0 to 63 of device 0 are in another") == 1);
    CUstream stream = nullptr;
    CHECK(pair.api.cuGreenCtxStreamCreate(&stream, greens[1], kStreamNonBlocking, 0) == kSuccess);
    CHECK(pair.api.cuEventRecord(pair.ready, stream) == 400);
    CHECK(pair.violations_about("another context") == 1);
    CUcontext context = nullptr;
    CHECK(pair.api.cuCtxFromGreenCtx(&context, greens[1]) == kSuccess);
    const CUevent event = pair.make_event(context, kEventDisableTiming);
    CHECK(pair.api.cuEventRecord(event, stream) == kSuccess);
    CHECK(pair.api.cuGreenCtxDestroy(greens[1]) == kSuccess);
    CHECK(pair.api.cuStreamDestroy(stream) == 709);
}

TEST_CASE("functions are found in the version that is pinned") {
    fake_reset(1, 0);
    void* address = nullptr;
    int status = 0;
    CHECK(cuGetProcAddress_v2("cuGreenCtxStreamCreate", &address, 12050, 0, &status) == kSuccess);
    CHECK(status == 0);
    CHECK(address == fake_function("cuGreenCtxStreamCreate"));
    CHECK(cuGetProcAddress_v2("cuGreenCtxStreamCreate", &address, 13000, 0, &status) == kSuccess);
    CHECK(status == 2);
    CHECK(address == nullptr);
    CHECK(FakePair::violations_about("asked for in version 13000, pinned is 12050") == 1);
    fake_set_driver_version(12040);
    CHECK(cuGetProcAddress_v2("cuGreenCtxStreamCreate", &address, 12050, 0, &status) == kSuccess);
    CHECK(status == 2);
    CHECK(FakePair::violations().size() == 1);
}
