// An accelerator on the CPU: `torch.device("emu")`, for tests of device code.
//
//     settings.h  costs and limits, the lock     operands.h  a tensor's other faces
//     queue.h     streams, virtual time          shapes.h    shapes of results
//     blocks.h, memory.h  the allocator          fallback.h  any operator
//     pinned.h    page-locked memory             link.h      copies
//     random.h    generators                     cells.h     LSTM and GRU
//     attention.h its kernels
//     guard.h     what torch asks of a device    kernels.h   allocation, views, draws
//
// This file says which kernel serves which operator, and what Python sees.

#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <torch/csrc/utils/pybind.h>

#include "attention.h"

namespace emulated {
namespace {

template <void (*kernel)(const c10::OperatorHandle&, Stack*)>
torch::CppFunction boxed() {
  return torch::CppFunction::makeFromBoxedFunction<kernel>();
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(boxed<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("unfold", at::native::unfold);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_", set_to_nothing);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl(
      "set_.source_Storage",
      static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("native_dropout", dropout);
  m.impl("convolution_overrideable", boxed<&convolution>());
  m.impl("convolution_backward_overrideable", boxed<&convolution_backward>());
  m.impl("_fused_sdp_choice", attention_kernel);
  m.impl("_scaled_dot_product_fused_attention_overrideable", attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", attention_backward);
  // torch would compose these of other operators; the CPU and GPUs have kernels.
  for (const auto* name :
       {"native_layer_norm", "native_group_norm", "addr", "addr.out", "_stack", "_stack.out",
        "mish_backward", "silu_backward", "silu_backward.grad_input", "mse_loss",
        "smooth_l1_loss"})
    m.impl(name, boxed<&fallback>());
}

// The kernels of the CPU that torch has for GPUs alone.
TORCH_LIBRARY_IMPL(aten, CPU, m) {
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// torch knows the shapes of an LSTM's alone.
TORCH_LIBRARY_IMPL(aten, Meta, m) {
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// A copy reads these bits itself; torch would resolve them first, by a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

#define EMU_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define EMU_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define EMU_FP32_TYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define EMU_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  AT_FORALL_LOWER_PRECISION_FP(EMU_LOWER)
  AT_FORALL_FP32(EMU_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(EMU_FP32_TYPE)
  AT_FORALL_PROMOTE(EMU_PROMOTE)
}

// Wait for everything, then take other settings.
void configure(
    const std::string& mode, size_t limit_bytes, int64_t fail_at,
    size_t segment_bytes, bool poison, const std::string& attention, double flops_per_s, double bytes_per_s,
    double link_bytes_per_s, double link_latency_s, double launch_s,
    const std::map<std::string, double>& kernel_s) {
  Lock lock;
  for (int device = 0; device < device_count; ++device)
    queues.synchronize_device(device);
  const bool same_segments = settings.segment_bytes == segment_bytes;
  if (!same_segments) memory.emptyCache();
  settings.mode = mode == "eager" ? Mode::eager
      : mode == "threads"         ? Mode::threads
                                  : Mode::lazy;
  settings.limit_bytes = limit_bytes;
  settings.allowed_bytes = 0;
  settings.fail_at = fail_at;
  settings.segment_bytes = segment_bytes;
  settings.poison = poison;
  settings.attention = attention == "flash" ? Attention::flash
      : attention == "fused"                ? Attention::fused
                                            : Attention::math;
  settings.flops_per_s = flops_per_s;
  settings.bytes_per_s = bytes_per_s;
  settings.link_bytes_per_s = link_bytes_per_s;
  settings.link_latency = picoseconds(link_latency_s);
  settings.launch = picoseconds(launch_s);
  settings.kernels.clear();
  for (const auto& [name, seconds] : kernel_s)
    settings.kernels[name] = picoseconds(seconds);
  memory.allocations = 0;
  memory.most_reserved = 0;
}

std::map<std::string, int64_t> counters() {
  Lock lock;
  return {
      {"launches", queues.launches},
      {"waits", queues.waits},
      {"allocations", memory.allocations},
      {"most_reserved_bytes", static_cast<int64_t>(memory.most_reserved)},
      {"shapes_inferred", shape_cache.inferred},
      {"host_time_ps", queues.host_time},
      {"pinned_bytes", pinned_memory.get_stats().active_bytes.current},
  };
}

}  // namespace
}  // namespace emulated

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &emulated::attention_kernel)
}  // namespace at::native

PYBIND11_MODULE(_emu, m) {
  c10::SetAllocator(emulated::device_type, &emulated::memory);
  at::setHostAllocator(emulated::device_type, &emulated::pinned_memory);
  at::RegisterPrivateUse1HooksInterface(&emulated::hooks);
  m.def("configure", &emulated::configure);
  m.def("counters", &emulated::counters);
  m.def("allow", [](size_t bytes) { emulated::settings.allowed_bytes = bytes; });
  m.def("allowed", [] { return emulated::settings.allowed_bytes; });
  m.attr("device_count") = emulated::device_count;
  m.def("default_generator", [](int device) { return emulated::default_generator(device); });
}
