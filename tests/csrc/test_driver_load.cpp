// Loading: what is said where there is no driver, or none that will do.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <string>

#include "cuda/driver.hpp"

using namespace pykern::cuda;

namespace {

std::string why_not(const char* library) {
    try {
        load(library);
    } catch (const DriverMissing& error) {
        return error.what();
    }
    return "loaded";
}

// Sets a variable of the old driver, which is loaded once for all, and sets it back at the end.
template <class T>
class Setting {
   public:
    Setting(const char* name, T value)
        : variable_(static_cast<T*>(dlsym(dlopen(PYKERN_OLD_DRIVER, RTLD_NOW), name))),
          before_(*variable_) {
        *variable_ = value;
    }
    ~Setting() { *variable_ = before_; }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

   private:
    T* variable_;
    T before_;
};

}  // namespace

TEST_CASE("no library is an error in the loader's words") {
    CHECK(why_not("libpykern_absent.so.1") ==
          "no CUDA driver: libpykern_absent.so.1: cannot open shared object file: No such file or "
          "directory");
}

TEST_CASE("a library that is no driver of today says what it lacks") {
    CHECK(
        why_not("libm.so.6") ==
        "the CUDA driver is too old: libm.so.6 has no cuGetProcAddress, which came with CUDA 11.3");
}

TEST_CASE("a driver from before CUDA 12 has all functions but those for SM groups") {
    const Api api = load(PYKERN_OLD_DRIVER);
#define PYKERN_CHECK_FOUND(name, version, parameters) \
    INFO(#name);                                      \
    CHECK((api.name != nullptr) == ((version) < 12000));
    PYKERN_CUDA_FUNCTIONS(PYKERN_CHECK_FOUND)
#undef PYKERN_CHECK_FOUND
    CHECK_THROWS_WITH_AS(throw_absent(api, "cuGreenCtxCreate", 12040),
                         "the CUDA driver is too old: it is 11.3, and cuGreenCtxCreate needs 12.4 "
                         "or newer",
                         DriverMissing);
}

TEST_CASE("a driver without a function that every step needs is refused by its name") {
    const Setting<const char*> lacks("old_driver_lacks", "cuGraphInstantiateWithFlags");
    CHECK(why_not(PYKERN_OLD_DRIVER) ==
          "the CUDA driver is too old: it is 11.3, and cuGraphInstantiateWithFlags needs 11.4 or "
          "newer");
}

TEST_CASE("a driver that does not start says why") {
    SUBCASE("in its own words") {
        const Setting<CUresult> starts("old_driver_starts", 100);
        CHECK(why_not(PYKERN_OLD_DRIVER) ==
              "the CUDA driver does not start: cuInit: CUDA_ERROR_NO_DEVICE (100): no CUDA-capable "
              "device is detected");
    }
    SUBCASE("by the number, where it has no words") {
        const Setting<CUresult> starts("old_driver_starts", 12345);
        CHECK(why_not(PYKERN_OLD_DRIVER) ==
              "the CUDA driver does not start: cuInit: unknown error (12345)");
    }
}
