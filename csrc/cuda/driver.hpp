// The CUDA driver, loaded when it is first asked for, and its functions as calls that throw.
#pragma once

#include <stdexcept>
#include <string>

#include "cuda/api.hpp"

namespace pykern::cuda {

// There is no driver, or none that is new enough. The text says which, and why.
class DriverMissing : public std::runtime_error {
   public:
    using std::runtime_error::runtime_error;
};

// A call that failed, in the driver's own words.
class CudaError : public std::runtime_error {
   public:
    CudaError(const char* call, CUresult code);

    const char* call() const noexcept { return call_; }
    CUresult code() const noexcept { return code_; }

   private:
    const char* call_;
    CUresult code_;
};

// The functions of this library, which stays loaded until the process ends; starts the driver.
// Functions that CUDA 12 brought may be missing, and are then null. Throws DriverMissing.
Api load(const char* library);

// The functions of libcuda.so.1: any thread may ask, and the first to ask loads it.
const Api& api();

// Has `api` give the functions of another library, which a file is by its path and never by its
// soname. For tests and rehearsals: objects of the library before are of no use from here on, and
// no other thread may ask.
void use_library(const std::string& library);

// Another number behind each such choice.
unsigned choice();

// "13.0" for 13000.
std::string release(int version);

// `call` is kept, not copied.
inline void check(CUresult result, const char* call) {
    if (result != kSuccess) [[unlikely]] {
        throw CudaError(call, result);
    }
}

[[noreturn]] void throw_absent(const Api& api, const char* name, int version);

// One function of the driver: throws CudaError where the driver's own returns a code, and
// DriverMissing where this driver does not have it.
template <class... Parameters>
class Call {
   public:
    constexpr Call(CUresult (*Api::*function)(Parameters...), const char* name, int version)
        : function_(function), name_(name), version_(version) {}

    void operator()(Parameters... arguments) const {
        const Api& driver = api();
        const auto function = driver.*function_;
        if (function == nullptr) [[unlikely]] {
            throw_absent(driver, name_, version_);
        }
        check(function(arguments...), name_);
    }

   private:
    CUresult (*Api::*function_)(Parameters...);
    const char* name_;
    int version_;
};

// driver::cuEventRecord(event, stream), and so on for each.
namespace driver {
#define PYKERN_CUDA_CALL(name, version, parameters) \
    inline constexpr Call name{&Api::name, #name, version};
PYKERN_CUDA_FUNCTIONS(PYKERN_CUDA_CALL)
#undef PYKERN_CUDA_CALL
}  // namespace driver

}  // namespace pykern::cuda
