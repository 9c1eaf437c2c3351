// The two other faces of a tensor of the device: for the CPU's kernels, and for shapes.
//
// Work that waits in a queue may own no tensor of the device: a kernel on a GPU keeps
// nothing alive either, and a tensor with a Python object needs the GIL to die. It holds
// tensors of the CPU over the same memory, which own nothing.

#pragma once

#include <ATen/ATen.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include "guard.h"

namespace emulated {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;

// While it lives, no profiler counts what the host allocates: on a GPU it would be in the
// kernel, or nothing.
class Uncounted {
 public:
  Uncounted() : before_(c10::ThreadLocalDebugInfo::current()) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(nullptr);
  }
  ~Uncounted() { c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(before_); }

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> before_;
};

// While it lives, operators go straight to the kernels of a backend: below autograd,
// autocast, Python's modes, and the observers that membudget puts over a backend.
class StraightToKernels {
 public:
  StraightToKernels()
      : guard_(c10::DispatchKeySet(c10::DispatchKey::BackendSelect), above()) {}

 private:
  static c10::DispatchKeySet above() {
    return c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet(
               {c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                c10::DispatchKey::PythonDispatcher, c10::DispatchKey::ADInplaceOrView,
                c10::DispatchKey::Functionalize, c10::DispatchKey::Fake,
                c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchVmapMode,
                c10::DispatchKey::FuncTorchGradWrapper,
                c10::DispatchKey::FuncTorchDynamicLayerFrontMode,
                c10::DispatchKey::FuncTorchDynamicLayerBackMode});
  }

  c10::impl::ForceDispatchKeyGuard guard_;
};

inline Tensor laid_out(const Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) tensor._set_conj(true);
  if (like.is_neg()) tensor._set_neg(true);
  return tensor;
}

// A tensor's memory as a storage of the CPU that does not own it.
inline c10::Storage borrowed(const Tensor& tensor) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage->nbytes(),
      c10::DataPtr(storage->mutable_data(), c10::Device(at::kCPU)), nullptr, false);
}

// Operands as the CPU's kernel gets them. Views of one storage stay views of one.
class OnCpu {
 public:
  Tensor operator()(const Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().is_cpu()) return tensor.detach().clone();  // The values of now.
    TORCH_CHECK(
        tensor.device().type() == device_type,
        "Expected all tensors to be on the same device, but found emu and ",
        tensor.device());
    auto found = seen_.find(tensor.storage().unsafeGetStorageImpl());
    if (found == seen_.end())
      found = seen_.emplace(tensor.storage().unsafeGetStorageImpl(), borrowed(tensor)).first;
    return laid_out(tensor, found->second, c10::DispatchKey::CPU);
  }

 private:
  std::map<const c10::StorageImpl*, c10::Storage> seen_;
};

// The operand of a shape function. A number that Python wrapped stays what it is.
inline Tensor on_meta(const Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  auto meta = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

inline Tensor zeros_on_cpu(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cpu()) return tensor;
  auto zeros = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU)).zero_();
  if (tensor.is_conj()) zeros._set_conj(true);
  if (tensor.is_neg()) zeros._set_neg(true);
  return zeros;
}

inline Tensor new_tensor(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType type, int device) {
  c10::DeviceGuard guard(c10::Device(device_type, static_cast<c10::DeviceIndex>(device)));
  return at::detail::empty_strided_generic(
      sizes, strides, &memory, c10::DispatchKeySet(device_key), type);
}

// Apply a function to every tensor of an operand or result.
template <class F>
IValue mapped(const IValue& value, F&& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const auto& tensor : value.toTensorVector()) list.push_back(change(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : tensor);
    return list;
  }
  return value;
}

template <class F>
void each_tensor(const IValue& value, F&& action) {
  if (value.isTensor()) return action(value.toTensor());
  if (value.isTensorList())
    for (const auto& tensor : value.toTensorVector()) action(tensor);
  else if (value.isOptionalTensorList())
    for (const auto& tensor : value.toOptionalTensorVector())
      if (tensor) action(*tensor);
}

}  // namespace emulated
