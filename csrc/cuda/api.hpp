// Api: the functions of the CUDA driver that pykern calls, each in one fixed version.
//
// Written by hand, so that building needs no toolkit; tests/csrc compares every type with the
// toolkit's where there is one. Names are the driver's own, because that is where they are looked
// up and documented (CUDA Driver API reference, 13.0).
#pragma once

#include <array>
#include <cstddef>

// The driver's own tags, so that a handle is the same type as in the toolkit's headers.
struct CUctx_st;
struct CUstream_st;
struct CUevent_st;
struct CUgraph_st;
struct CUgraphNode_st;
struct CUgraphExec_st;
struct CUgreenCtx_st;
struct CUdevResourceDesc_st;
struct CUarray_st;

namespace pykern::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = CUctx_st*;
using CUstream = CUstream_st*;
using CUevent = CUevent_st*;
using CUgraph = CUgraph_st*;
using CUgraphNode = CUgraphNode_st*;
using CUgraphExec = CUgraphExec_st*;
using CUgreenCtx = CUgreenCtx_st*;
using CUdevResourceDesc = CUdevResourceDesc_st*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kOutOfMemory = 2;
inline constexpr CUresult kDeinitialized = 4;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kPeerAccessAlreadyEnabled = 704;

inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventTimed = 0;
inline constexpr unsigned kEventDisableTiming = 2;
inline constexpr int kCaptureRelaxed = 2;
inline constexpr int kAttributeMultiprocessorCount = 16;
inline constexpr unsigned kMemoryTypeUnified = 4;
inline constexpr int kResourceTypeSm = 1;
inline constexpr unsigned kGreenCtxDefaultStream = 1;

// CUDA_MEMCPY3D_v2.
struct Memcpy3D {
    std::size_t srcXInBytes, srcY, srcZ, srcLOD;
    unsigned srcMemoryType;
    const void* srcHost;
    CUdeviceptr srcDevice;
    CUarray_st* srcArray;
    void* reserved0;
    std::size_t srcPitch, srcHeight;
    std::size_t dstXInBytes, dstY, dstZ, dstLOD;
    unsigned dstMemoryType;
    void* dstHost;
    CUdeviceptr dstDevice;
    CUarray_st* dstArray;
    void* reserved1;
    std::size_t dstPitch, dstHeight;
    std::size_t WidthInBytes, Height, Depth;
};

// CUdevSmResource.
struct DevSmResource {
    unsigned smCount, minSmPartitionSize, smCoscheduledAlignment;
};

// CUdevResource_v1, of which only the multiprocessors are used.
struct DevResource {
    int type;
    std::array<unsigned char, 92> internal_padding;
    union {
        DevSmResource sm;
        std::array<unsigned char, 48> oversize;
    };
};

// X(name, version, parameters): the version is the CUDA release that brought this prototype, which
// cuGetProcAddress then answers with whatever newer ones the driver has.
// clang-format off
#define PYKERN_CUDA_FUNCTIONS(X)                                                                   \
    X(cuInit, 2000, (unsigned flags))                                                              \
    X(cuDriverGetVersion, 2020, (int* version))                                                    \
    X(cuGetErrorName, 6000, (CUresult error, const char** name))                                   \
    X(cuGetErrorString, 6000, (CUresult error, const char** text))                                 \
    X(cuDeviceGetCount, 2000, (int* count))                                                        \
    X(cuDeviceGet, 2000, (CUdevice* device, int ordinal))                                          \
    X(cuDeviceGetName, 2000, (char* name, int length, CUdevice device))                            \
    X(cuDeviceGetAttribute, 2000, (int* value, int attribute, CUdevice device))                    \
    X(cuDeviceCanAccessPeer, 4000, (int* can, CUdevice device, CUdevice peer))                     \
    X(cuDevicePrimaryCtxRetain, 7000, (CUcontext* context, CUdevice device))                       \
    X(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                         \
    X(cuCtxGetCurrent, 4000, (CUcontext* context))                                                 \
    X(cuCtxSetCurrent, 4000, (CUcontext context))                                                  \
    X(cuCtxSynchronize, 2000, ())                                                                  \
    X(cuCtxEnablePeerAccess, 4000, (CUcontext peer, unsigned flags))                               \
    X(cuStreamCreateWithPriority, 5050, (CUstream* stream, unsigned flags, int priority))          \
    X(cuStreamDestroy, 4000, (CUstream stream))                                                    \
    X(cuStreamSynchronize, 2000, (CUstream stream))                                                \
    X(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned flags))                   \
    X(cuThreadExchangeStreamCaptureMode, 10010, (int* mode))                                       \
    X(cuEventCreate, 2000, (CUevent* event, unsigned flags))                                       \
    X(cuEventDestroy, 4000, (CUevent event))                                                       \
    X(cuEventRecord, 2000, (CUevent event, CUstream stream))                                       \
    X(cuEventQuery, 2000, (CUevent event))                                                         \
    X(cuEventSynchronize, 2000, (CUevent event))                                                   \
    X(cuEventElapsedTime, 2000, (float* milliseconds, CUevent start, CUevent end))                 \
    X(cuMemcpyAsync, 4000, (CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream)) \
    X(cuGraphCreate, 10000, (CUgraph* graph, unsigned flags))                                      \
    X(cuGraphDestroy, 10000, (CUgraph graph))                                                      \
    X(cuGraphAddChildGraphNode, 10000, (CUgraphNode* node, CUgraph graph,                          \
                                        const CUgraphNode* after, std::size_t num_after,           \
                                        CUgraph child))                                            \
    X(cuGraphAddMemcpyNode, 10000, (CUgraphNode* node, CUgraph graph, const CUgraphNode* after,    \
                                    std::size_t num_after, const Memcpy3D* copy,                   \
                                    CUcontext context))                                            \
    X(cuGraphAddEventRecordNode, 11010, (CUgraphNode* node, CUgraph graph,                         \
                                         const CUgraphNode* after, std::size_t num_after,          \
                                         CUevent event))                                           \
    X(cuGraphExecEventRecordNodeSetEvent, 11010, (CUgraphExec exec, CUgraphNode node,              \
                                                  CUevent event))                                  \
    X(cuGraphInstantiateWithFlags, 11040, (CUgraphExec* exec, CUgraph graph,                       \
                                           unsigned long long flags))                              \
    X(cuGraphUpload, 11010, (CUgraphExec exec, CUstream stream))                                   \
    X(cuGraphLaunch, 10000, (CUgraphExec exec, CUstream stream))                                   \
    X(cuGraphExecDestroy, 10000, (CUgraphExec exec))                                               \
    X(cuDeviceGetDevResource, 12040, (CUdevice device, DevResource* resource, int type))           \
    X(cuDevSmResourceSplitByCount, 12040, (DevResource* groups, unsigned* num_groups,              \
                                           const DevResource* whole, DevResource* rest,            \
                                           unsigned flags, unsigned min_count))                    \
    X(cuDevResourceGenerateDesc, 12040, (CUdevResourceDesc* description, DevResource* resources,   \
                                         unsigned num_resources))                                  \
    X(cuGreenCtxCreate, 12040, (CUgreenCtx* green, CUdevResourceDesc description, CUdevice device, \
                                unsigned flags))                                                   \
    X(cuGreenCtxDestroy, 12040, (CUgreenCtx green))                                                \
    X(cuCtxFromGreenCtx, 12040, (CUcontext* context, CUgreenCtx green))                            \
    X(cuGreenCtxStreamCreate, 12050, (CUstream* stream, CUgreenCtx green, unsigned flags,          \
                                      int priority))
// clang-format on

// One pointer per function.
struct Api {
// NOLINTNEXTLINE(bugprone-macro-parentheses): a list of parameters cannot stand in more of them
#define PYKERN_CUDA_POINTER(name, version, parameters) CUresult(*name) parameters = nullptr;
    PYKERN_CUDA_FUNCTIONS(PYKERN_CUDA_POINTER)
#undef PYKERN_CUDA_POINTER
};

}  // namespace pykern::cuda
