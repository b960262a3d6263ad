// The driver's functions, devices and objects, on the fake driver.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "cuda/device.hpp"
#include "cuda/driver.hpp"
#include "cuda/objects.hpp"
#include "fake_world.hpp"

using namespace pykern::cuda;

namespace {

CUcontext current() {
    CUcontext context = nullptr;
    driver::cuCtxGetCurrent(&context);
    return context;
}

// Calls of this object's destructor in a child after a fork: nothing, if the child exits with 0.
template <class Object>
int calls_in_a_child(Object& object, const char* function) {
    const pid_t child = fork();
    if (child == 0) {
        object.reset();
        _exit(static_cast<int>(fake_calls(function)));
    }
    int status = -1;
    waitpid(child, &status, 0);
    return status;
}

}  // namespace

TEST_CASE("every function is found, each in its version") {
    const FakeWorld world(1);
    // The fake tells of any other version. ctest has a libcuda.so.1 beside it, which lacks some.
    const Api& found = api();
#define PYKERN_CHECK_FOUND(name, version, parameters) \
    CHECK(reinterpret_cast<void*>(found.name) == fake_function(#name));
    PYKERN_CUDA_FUNCTIONS(PYKERN_CHECK_FOUND)
#undef PYKERN_CHECK_FOUND
}

TEST_CASE("an error has the call, the number and the driver's words") {
    const FakeWorld world(1);
    const PrimaryContext device(0);
    const Stream stream = make_stream(device.get());
    const Event event = make_event(device.get(), kEventDisableTiming);
    const auto failure = [&](CUresult code) {
        fake_fail("cuEventRecord", 1, code, 0);
        try {
            driver::cuEventRecord(event.get(), stream.get());
        } catch (const CudaError& error) {
            CHECK(std::string(error.call()) == "cuEventRecord");
            CHECK(error.code() == code);
            return std::string(error.what());
        }
        return std::string("no error");
    };
    CHECK(failure(400) ==
          "cuEventRecord: CUDA_ERROR_INVALID_HANDLE (400): invalid resource handle");
    CHECK(failure(4321) == "cuEventRecord: unknown error (4321)");
    CHECK(
        failure(719) ==
        "cuEventRecord: CUDA_ERROR_LAUNCH_FAILED (719): unspecified launch failure. The process's "
        "CUDA context is lost: only a new process can use CUDA again");
}

TEST_CASE("devices are asked by torch's numbers, and one that is not there is named") {
    const FakeWorld world(2);
    CHECK(driver_version() == "13.0");
    CHECK(device_count() == 2);
    CHECK(device_name(1) == "fake device 1");
    CHECK(num_sms(1) == 132);
    for (const int absent : {-1, 2}) {
        const std::string text =
            "no device cuda:" + std::to_string(absent) + ": the driver has 2 devices";
        CHECK_THROWS_WITH_AS(num_sms(absent), text.c_str(), std::out_of_range);
        CHECK_THROWS_WITH_AS(PrimaryContext{absent}, text.c_str(), std::out_of_range);
    }
}

TEST_CASE("access to a peer is where there is a way") {
    const FakeWorld world(3);
    fake_set_peer(0, 2, 0);
    CHECK(can_access_peer(0, 1));
    CHECK(!can_access_peer(0, 2));
}

TEST_CASE("a primary context is one for all who hold it, and goes with the last") {
    const FakeWorld world(1);
    PrimaryContext first(0);
    const CUcontext context = first.get();
    {
        const PrimaryContext second(0);
        CHECK(second.get() == context);
    }
    const PrimaryContext moved = std::move(first);
    CHECK(moved.get() == context);
    CHECK(fake_calls("cuDevicePrimaryCtxRelease") == 1);
}

TEST_CASE("what is made and ended under another context leaves the caller's current") {
    const FakeWorld world(2);
    const PrimaryContext zero(0);
    const PrimaryContext one(1);
    const CurrentContext mine(zero.get());
    {
        const Stream stream = make_stream(one.get());
        const Event event = make_event(one.get(), kEventDisableTiming);
        CHECK(current() == zero.get());
        // Refused by the fake if they were not of the same context.
        driver::cuEventRecord(event.get(), stream.get());
        driver::cuStreamSynchronize(stream.get());
    }
    CHECK(current() == zero.get());
    fake_fail("cuStreamCreateWithPriority", 1, kOutOfMemory, 0);
    CHECK_THROWS_AS(make_stream(one.get()), CudaError);
    CHECK(current() == zero.get());
}

TEST_CASE("an object is ended once, by its last owner, on whichever thread") {
    const FakeWorld world(1);
    const PrimaryContext device(0);
    Event event = make_event(device.get(), kEventTimed);
    Event other = std::move(event);
    event = std::move(other);
    CHECK(fake_calls("cuEventDestroy") == 0);
    std::thread([&event] { const Event last = std::move(event); }).join();
    CHECK(fake_calls("cuEventDestroy") == 1);
}

TEST_CASE("an end that fails is not an error, as when the driver has gone at exit") {
    const FakeWorld world(1);
    const PrimaryContext device(0);
    Stream stream = make_stream(device.get());
    fake_fail("cuStreamDestroy", 1, kDeinitialized, 0);
    CHECK_NOTHROW(stream.reset());
    CHECK(fake_calls("cuStreamDestroy") == 1);
}

TEST_CASE("a child after a fork ends nothing of its parent's") {
    const FakeWorld world(1);
    auto device = std::make_unique<PrimaryContext>(0);
    Stream stream = make_stream(device->get());
    CHECK(calls_in_a_child(stream, "cuStreamDestroy") == 0);
    CHECK(calls_in_a_child(device, "cuDevicePrimaryCtxRelease") == 0);
}
