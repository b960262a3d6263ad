// The types of csrc/cuda/api.hpp against the toolkit's. Built only where there is a toolkit: see
// CMakeLists.txt. Nothing here runs; what is wrong does not compile.
#include "cuda/api.hpp"
// After api.hpp, because the toolkit redefines some of the driver's names as macros.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstddef>
#include <type_traits>

namespace pykern::cuda {

namespace {

// Both sides in the same words: an enumeration is an int of its size, the two structures that
// api.hpp declares by itself are the toolkit's, and all else is what it is.
template <class T>
struct Plain {
    using Type = T;
};
template <class T>
    requires(std::is_enum_v<T>) && (sizeof(T) == sizeof(int))
struct Plain<T> {
    using Type = int;
};
template <>
struct Plain<Memcpy3D> {
    using Type = CUDA_MEMCPY3D_v2;
};
template <>
struct Plain<DevResource> {
    using Type = CUdevResource_v1;
};
template <class T>
struct Plain<const T> {
    using Type = const Plain<T>::Type;
};
template <class T>
struct Plain<T*> {
    using Type = Plain<T>::Type*;
};
template <class Result, class... Parameters>
struct Plain<Result(Parameters...)> {
    using Type = Plain<Result>::Type(typename Plain<Parameters>::Type...);
};

template <class Ours, class Toolkits>
inline constexpr bool kSame =
    std::is_same_v<typename Plain<Ours>::Type, typename Plain<Toolkits>::Type>;

// Api once more, under names that are not the toolkit's macros.
struct Ours {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a list of parameters cannot stand in more of them
#define PYKERN_CUDA_OURS(name, version, parameters) CUresult(*ours_##name) parameters;
    PYKERN_CUDA_FUNCTIONS(PYKERN_CUDA_OURS)
#undef PYKERN_CUDA_OURS
};

#define PYKERN_CUDA_SAME(name, version, parameters)                            \
    static_assert(kSame<decltype(Ours::ours_##name), PFN_##name##_v##version>, \
                  #name " is not the toolkit's of version " #version);
PYKERN_CUDA_FUNCTIONS(PYKERN_CUDA_SAME)
#undef PYKERN_CUDA_SAME

// A wrong prototype is seen: a parameter too few, of another type, of another pointee, another
// constness, and the prototype of another version.
static_assert(!kSame<CUresult (*)(CUstream, CUevent), PFN_cuStreamWaitEvent_v3020>);
static_assert(!kSame<CUresult (*)(CUstream, CUstream, unsigned), PFN_cuStreamWaitEvent_v3020>);
static_assert(!kSame<CUresult (*)(CUstream, CUevent, long), PFN_cuStreamWaitEvent_v3020>);
static_assert(!kSame<CUresult (*)(CUresult, char**), PFN_cuGetErrorName_v6000>);
static_assert(!kSame<CUresult (*)(CUdevice, Memcpy3D*, int), PFN_cuDeviceGetDevResource_v12040>);
static_assert(kSame<PFN_cuGraphExecUpdate_v12000, PFN_cuGraphExecUpdate_v12000>);
static_assert(!kSame<PFN_cuGraphExecUpdate_v10020, PFN_cuGraphExecUpdate_v12000>);

#define PYKERN_SAME_PLACE(Ours, ours, Toolkits, toolkits)                \
    static_assert(offsetof(Ours, ours) == offsetof(Toolkits, toolkits)); \
    static_assert(std::is_same_v<Plain<decltype(Ours::ours)>::Type,      \
                                 Plain<decltype(Toolkits::toolkits)>::Type>)
#define PYKERN_SAME_COPY(member) PYKERN_SAME_PLACE(Memcpy3D, member, CUDA_MEMCPY3D_v2, member)

static_assert(sizeof(Memcpy3D) == sizeof(CUDA_MEMCPY3D_v2));
PYKERN_SAME_COPY(srcXInBytes);
PYKERN_SAME_COPY(srcY);
PYKERN_SAME_COPY(srcZ);
PYKERN_SAME_COPY(srcLOD);
PYKERN_SAME_COPY(srcHost);
PYKERN_SAME_COPY(srcDevice);
PYKERN_SAME_COPY(srcArray);
PYKERN_SAME_COPY(reserved0);
PYKERN_SAME_COPY(srcPitch);
PYKERN_SAME_COPY(srcHeight);
PYKERN_SAME_COPY(dstXInBytes);
PYKERN_SAME_COPY(dstY);
PYKERN_SAME_COPY(dstZ);
PYKERN_SAME_COPY(dstLOD);
PYKERN_SAME_COPY(dstHost);
PYKERN_SAME_COPY(dstDevice);
PYKERN_SAME_COPY(dstArray);
PYKERN_SAME_COPY(reserved1);
PYKERN_SAME_COPY(dstPitch);
PYKERN_SAME_COPY(dstHeight);
PYKERN_SAME_COPY(WidthInBytes);
PYKERN_SAME_COPY(Height);
PYKERN_SAME_COPY(Depth);
// Enumerations there, without a sign.
static_assert(offsetof(Memcpy3D, srcMemoryType) == offsetof(CUDA_MEMCPY3D_v2, srcMemoryType));
static_assert(offsetof(Memcpy3D, dstMemoryType) == offsetof(CUDA_MEMCPY3D_v2, dstMemoryType));
static_assert(sizeof(Memcpy3D::srcMemoryType) == sizeof(CUDA_MEMCPY3D_v2::srcMemoryType));
static_assert(sizeof(Memcpy3D::dstMemoryType) == sizeof(CUDA_MEMCPY3D_v2::dstMemoryType));

#define PYKERN_SAME_RESOURCE(ours, toolkits) \
    PYKERN_SAME_PLACE(DevResource, ours, CUdevResource_v1, toolkits)

// The toolkit may name more kinds of resource in the union, but the driver keeps to this size.
static_assert(sizeof(DevResource) == sizeof(CUdevResource_v1));
PYKERN_SAME_RESOURCE(type, type);
PYKERN_SAME_RESOURCE(sm.smCount, sm.smCount);
PYKERN_SAME_RESOURCE(sm.minSmPartitionSize, sm.minSmPartitionSize);
PYKERN_SAME_RESOURCE(sm.smCoscheduledAlignment, sm.smCoscheduledAlignment);
static_assert(offsetof(DevResource, internal_padding) ==
              offsetof(CUdevResource_v1, _internal_padding));
static_assert(sizeof(DevResource::internal_padding) == sizeof(CUdevResource_v1::_internal_padding));
static_assert(offsetof(DevResource, oversize) == offsetof(CUdevResource_v1, _oversize));

static_assert(kSuccess == CUDA_SUCCESS);
static_assert(kInvalidValue == CUDA_ERROR_INVALID_VALUE);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kDeinitialized == CUDA_ERROR_DEINITIALIZED);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);
static_assert(kPeerAccessAlreadyEnabled == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
static_assert(kStreamNonBlocking == CU_STREAM_NON_BLOCKING);
static_assert(kEventTimed == CU_EVENT_DEFAULT);
static_assert(kEventDisableTiming == CU_EVENT_DISABLE_TIMING);
static_assert(kAttributeMultiprocessorCount == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
static_assert(kMemoryTypeUnified == CU_MEMORYTYPE_UNIFIED);
static_assert(kResourceTypeSm == CU_DEV_RESOURCE_TYPE_SM);
static_assert(kGreenCtxDefaultStream == CU_GREEN_CTX_DEFAULT_STREAM);

}  // namespace

}  // namespace pykern::cuda
