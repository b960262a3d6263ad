// A driver of before CUDA 12, as a library of its own: it finds functions through the lookup of
// four arguments, and its functions do nothing. A test sets what it lacks and how it starts.
#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "cuda/api.hpp"

using namespace pykern::cuda;

namespace {

struct Entry {
    void* function;
    int version;
};

template <class Function>
struct Stub;
template <class... Parameters>
struct Stub<CUresult (*)(Parameters...)> {
    static CUresult call(Parameters... /*arguments*/) { return kSuccess; }
};

CUresult get_version(int* version) {
    *version = 11030;
    return kSuccess;
}

CUresult get_name(CUresult error, const char** name) {
    *name = error == 100 ? "CUDA_ERROR_NO_DEVICE" : nullptr;
    return *name != nullptr ? kSuccess : kInvalidValue;
}

CUresult get_text(CUresult error, const char** text) {
    *text = error == 100 ? "no CUDA-capable device is detected" : nullptr;
    return *text != nullptr ? kSuccess : kInvalidValue;
}

}  // namespace

extern "C" {

const char* old_driver_lacks = "";
CUresult old_driver_starts = kSuccess;

CUresult old_driver_init(unsigned /*flags*/) { return old_driver_starts; }

CUresult cuGetProcAddress(const char* symbol, void** function, int version, std::uint64_t flags) {
    static const std::map<std::string, Entry> entries = [] {
        std::map<std::string, Entry> all;
#define PYKERN_ENTRY(name, since, parameters) \
    all[#name] = {reinterpret_cast<void*>(&Stub<decltype(Api::name)>::call), since};
        PYKERN_CUDA_FUNCTIONS(PYKERN_ENTRY)
#undef PYKERN_ENTRY
        all["cuInit"].function = reinterpret_cast<void*>(&old_driver_init);
        all["cuDriverGetVersion"].function = reinterpret_cast<void*>(&get_version);
        all["cuGetErrorName"].function = reinterpret_cast<void*>(&get_name);
        all["cuGetErrorString"].function = reinterpret_cast<void*>(&get_text);
        return all;
    }();
    *function = nullptr;
    const auto found = entries.find(symbol);
    if (flags != 0 || found == entries.end() || std::string_view(old_driver_lacks) == symbol) {
        return 500;
    }
    if (found->second.version != version || version >= 12000) return 500;
    *function = found->second.function;
    return kSuccess;
}

}  // extern "C"
