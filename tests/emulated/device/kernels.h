// The operators that no kernel of the CPU can serve: memory, views, draws, waits.

#pragma once

#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_local_scalar_dense_native.h>

#include "cells.h"
#include "link.h"

namespace emulated {

using at::IntArrayRef;
template <class T>
using Optional = std::optional<T>;

inline Tensor empty(
    IntArrayRef size, Optional<at::ScalarType> type, Optional<at::Layout>,
    Optional<c10::Device> device, Optional<bool>, Optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(
      size, &memory, c10::DispatchKeySet(device_key), c10::dtype_or_default(type), format);
}

inline Tensor empty_strided(
    IntArrayRef size, IntArrayRef stride, Optional<at::ScalarType> type, Optional<at::Layout>,
    Optional<c10::Device> device, Optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &memory, c10::DispatchKeySet(device_key), c10::dtype_or_default(type));
}

inline const Tensor& resize_(
    const Tensor& self, IntArrayRef size, Optional<at::MemoryFormat> format) {
  resize_to(self, size);
  if (format) self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

inline Tensor& set_to_nothing(Tensor& self) {
  return at::native::set_tensor_(self, at::empty({0}, self.options()));
}

inline at::Scalar local_scalar(const Tensor& self) {
  const int device = self.device().index();
  queues.synchronize(queues.end_of(device, current_stream(device)));
  return at::native::_local_scalar_dense_cpu(OnCpu()(self));
}

inline void record_stream(Tensor& self, at::Stream stream) {
  memory.recordStream(self.storage().data_ptr(), stream);
}

// As on a GPU, one operator without a workspace, which saves its mask. The product with
// mask and scale is what the backward computes, too.
inline std::tuple<Tensor, Tensor> dropout(const Tensor& x, double p, Optional<bool> train) {
  const auto mask_options = x.options().dtype(at::kBool);
  if (train && !*train) return {x.clone(), at::ones_like(x, mask_options)};
  auto mask = at::empty_like(x, mask_options).bernoulli_(1 - p, std::nullopt);
  return {at::native_dropout_backward(x, mask, p == 1 ? 0.0 : 1 / (1 - p)), mask};
}

// Convolutions have an entrance of their own for a device; behind it is the CPU's kernel.
inline void convolution(const c10::OperatorHandle&, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution", "");
  fallback(op, stack);
}

inline void convolution_backward(const c10::OperatorHandle& entrance, Stack* stack) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::convolution_backward", "");
  auto operands = torch::jit::pop(*stack, entrance.schema().arguments().size());
  const auto wanted = operands.back().toBoolList();
  IValue bias_sizes;
  if (wanted[2]) bias_sizes = c10::List<int64_t>({operands[0].toTensor().size(1)});
  operands.insert(operands.begin() + 3, bias_sizes);
  for (auto& result : run(op, std::move(operands))) stack->push_back(std::move(result));
}

}  // namespace emulated
