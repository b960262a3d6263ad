#include "cuda/driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace pykern::cuda {

namespace {

// Functions that came with CUDA 12 serve SM groups only; all else runs without them.
constexpr int kFirstOptionalVersion = 12000;

std::string release_of(const Api& api) {
    int version = 0;
    if (api.cuDriverGetVersion == nullptr || api.cuDriverGetVersion(&version) != kSuccess) {
        return "of unknown version";
    }
    return release(version);
}

// The codes after which, as the driver's documentation says, the process has to be started anew.
bool loses_context(CUresult code) {
    switch (code) {
        case 226:  // CONTAINED
        case 700:  // ILLEGAL_ADDRESS
        case 702:  // LAUNCH_TIMEOUT
        case 710:  // ASSERT
        case 714:  // HARDWARE_STACK_ERROR
        case 715:  // ILLEGAL_INSTRUCTION
        case 716:  // MISALIGNED_ADDRESS
        case 717:  // INVALID_ADDRESS_SPACE
        case 718:  // INVALID_PC
        case 719:  // LAUNCH_FAILED
        case 721:  // TENSOR_MEMORY_LEAK
        case 810:  // MPS_CLIENT_TERMINATED
        case 911:  // EXTERNAL_DEVICE
            return true;
        default:
            return false;
    }
}

std::string describe(const Api& api, const char* call, CUresult code) {
    const char* name = nullptr;
    const char* text = nullptr;
    // Both leave null for a code that this driver does not know.
    api.cuGetErrorName(code, &name);
    api.cuGetErrorString(code, &text);
    std::string result = std::string(call) + ": " + (name == nullptr ? "unknown error" : name) +
                         " (" + std::to_string(code) + ")";
    if (text != nullptr) result += std::string(": ") + text;
    if (loses_context(code)) {
        result += ". The process's CUDA context is lost: only a new process can use CUDA again";
    }
    return result;
}

// Looks functions up in the version asked for. A bare dlsym would give the first version of each.
class Finder {
   public:
    Finder(void* library, const char* path)
        : newer_(reinterpret_cast<Newer>(dlsym(library, "cuGetProcAddress_v2"))),
          older_(reinterpret_cast<Older>(dlsym(library, "cuGetProcAddress"))) {
        if (newer_ == nullptr && older_ == nullptr) {
            throw DriverMissing(std::string("the CUDA driver is too old: ") + path +
                                " has no cuGetProcAddress, which came with CUDA 11.3");
        }
    }

    void* find(const char* name, int version) const {
        void* found = nullptr;
        const CUresult result = newer_ != nullptr ? newer_(name, &found, version, 0, nullptr)
                                                  : older_(name, &found, version, 0);
        return result == kSuccess ? found : nullptr;
    }

   private:
    using Older = CUresult (*)(const char*, void**, int, std::uint64_t);
    using Newer = CUresult (*)(const char*, void**, int, std::uint64_t, int*);

    Newer newer_;
    Older older_;
};

template <class Function>
void find(const Finder& finder, const Api& api, Function*& function, const char* name,
          int version) {
    function = reinterpret_cast<Function*>(finder.find(name, version));
    if (function == nullptr && version < kFirstOptionalVersion) throw_absent(api, name, version);
}

std::mutex choosing;
// Relaxed: threads that use objects of a driver have been ordered by whoever chooses another.
std::atomic<unsigned> times_chosen = 0;
std::atomic<const Api*> in_use = nullptr;

// Never destroyed: objects of the driver may end after the static objects of this file.
std::string& library_in_use() {
    static auto& library = *new std::string("libcuda.so.1");
    return library;
}

const Api& load_in_use() {
    static auto& loaded = *new std::map<std::string, Api>();
    const std::scoped_lock lock(choosing);
    auto found = loaded.find(library_in_use());
    if (found == loaded.end()) {
        found = loaded.emplace(library_in_use(), load(library_in_use().c_str())).first;
    }
    in_use.store(&found->second, std::memory_order_release);
    return found->second;
}

}  // namespace

std::string release(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

CudaError::CudaError(const char* call, CUresult code)
    : std::runtime_error(describe(api(), call, code)), call_(call), code_(code) {}

void throw_absent(const Api& api, const char* name, int version) {
    throw DriverMissing("the CUDA driver is too old: it is " + release_of(api) + ", and " + name +
                        " needs " + release(version) + " or newer");
}

Api load(const char* library) {
    void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) {
        // NOLINTNEXTLINE(concurrency-mt-unsafe): each thread has a text of its own in glibc
        throw DriverMissing(std::string("no CUDA driver: ") + dlerror());
    }
    const Finder finder(handle, library);
    Api api;
#define PYKERN_CUDA_FIND(name, version, parameters) find(finder, api, api.name, #name, version);
    PYKERN_CUDA_FUNCTIONS(PYKERN_CUDA_FIND)
#undef PYKERN_CUDA_FIND
    const CUresult result = api.cuInit(0);
    if (result != kSuccess) {
        throw DriverMissing("the CUDA driver does not start: " + describe(api, "cuInit", result));
    }
    return api;
}

const Api& api() {
    const Api* found = in_use.load(std::memory_order_acquire);
    return found != nullptr ? *found : load_in_use();
}

unsigned choice() { return times_chosen.load(std::memory_order_relaxed); }

void use_library(const std::string& library) {
    const std::scoped_lock lock(choosing);
    if (library == library_in_use()) return;
    library_in_use() = library;
    times_chosen.fetch_add(1, std::memory_order_relaxed);
    in_use.store(nullptr, std::memory_order_release);
}

}  // namespace pykern::cuda
