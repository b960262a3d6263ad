// Operations on GPUs as a torch for CPUs has them, in a torch that has kernels of CUDA's.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <optional>
#include <vector>

namespace oracle {

template <c10::DispatchKey kComposite>
void run_composite(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    op.callBoxedForDispatchKey(kComposite, *stack);
}

// Where torch has a kernel for GPUs, there comes the kernel that a torch for CPUs would take: the
// first of the general ones in the order in which it looks for them, or else the given function.
template <auto kRun>
class Overriding {
   public:
    Overriding() {
        for (const c10::OperatorName& name : torchs_.getAllOpNames()) {
            const auto op = torchs_.findSchema(name);
            if (!op || !name.name.starts_with("aten::")) continue;
            if (op->hasKernelForDispatchKey(c10::DispatchKey::CUDA)) override_in(*op);
        }
    }

   private:
    void override_in(const c10::OperatorHandle& op) {
        using enum c10::DispatchKey;
        if (op.hasKernelForDispatchKey(CompositeExplicitAutogradNonFunctional)) {
            put<&run_composite<CompositeExplicitAutogradNonFunctional>>(op, CUDA);
        } else if (op.hasKernelForDispatchKey(CompositeExplicitAutograd)) {
            put<&run_composite<CompositeExplicitAutograd>>(op, CUDA);
        } else if (op.hasKernelForDispatchKey(CompositeImplicitAutograd)) {
            // Its operations are recorded, and not the call.
            put<&run_composite<CompositeImplicitAutograd>>(op, CUDA);
            put<&run_composite<CompositeImplicitAutograd>>(op, AutogradCUDA);
        } else {
            put<kRun>(op, CUDA);
        }
    }

    template <auto kKernel>
    void put(const c10::OperatorHandle& op, c10::DispatchKey key) {
        handles_.push_back(torchs_.registerImpl(
            op.operator_name(), key, c10::KernelFunction::makeFromBoxedFunction<kKernel>(),
            std::nullopt, nullptr, "device oracle"));
    }

    c10::Dispatcher& torchs_ = c10::Dispatcher::singleton();
    std::vector<c10::RegistrationHandleRAII> handles_;
};

}  // namespace oracle
