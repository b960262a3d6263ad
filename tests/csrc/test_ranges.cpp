// Names of streams; tests/runtime/test_ranges.py has the rest.
#ifdef PYKERN_NVTX

#include <doctest/doctest.h>
#include <nvtx3/nvToolsExt.h>

#include <cstdint>
#include <string>

#include "exec/ranges.hpp"

namespace {

constexpr std::int32_t kCudaStream = 0x40003;  // NVTX_RESOURCE_TYPE_CUDA_STREAM

struct Named {
    std::string domain;
    std::int32_t type = 0;
    const void* resource = nullptr;
    std::string name;
};

std::string domain;
Named stream_named;

nvtxDomainHandle_t create_domain(const char* name) {
    domain = name;
    return reinterpret_cast<nvtxDomainHandle_t>(&domain);
}

nvtxResourceHandle_t create_resource(nvtxDomainHandle_t in, nvtxResourceAttributes_t* resource) {
    stream_named = {*reinterpret_cast<std::string*>(in), resource->identifierType,
                    resource->identifier.pValue, resource->message.ascii};
    return nullptr;
}

int attach(NvtxGetExportTableFunc_t get_export_table) {
    const auto* callbacks =
        static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
    NvtxFunctionTable table = nullptr;
    if (callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, nullptr) == 0) return 0;
    *table[NVTX_CBID_CORE2_DomainCreateA] = reinterpret_cast<NvtxFunctionPointer>(create_domain);
    *table[NVTX_CBID_CORE2_DomainResourceCreate] =
        reinterpret_cast<NvtxFunctionPointer>(create_resource);
    return 1;
}

// NVTX asks this pointer for a tool that is linked in, at the first call of any test.
[[maybe_unused]] const bool is_linked_in = (InitializeInjectionNvtx2_fnptr = attach) != nullptr;

}  // namespace

TEST_CASE("a stream is named as a resource of the domain") {
    int here = 0;
    auto* stream = reinterpret_cast<CUstream_st*>(&here);
    pykern::name_stream(stream, "pykern dev2 compute");
    CHECK(stream_named.domain == "pykern");
    CHECK(stream_named.type == kCudaStream);
    CHECK(stream_named.resource == stream);
    CHECK(stream_named.name == "pykern dev2 compute");
}

#endif
