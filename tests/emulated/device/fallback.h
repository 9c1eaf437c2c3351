// Any operator on the device: the CPU's kernel, over the device's memory, when its turn
// comes.
//
//     1. shapes of the results, from the cache          now
//     2. memory for them, from the allocator            now
//     3. the operands as the CPU's kernel reads them    now
//     4. the kernel, its results copied into place      when the stream runs
//
// An operator whose shapes depend on values is run at once, after a wait of the host.

#pragma once

#include "shapes.h"

namespace emulated {

inline double flops_of(const std::string& name, c10::ArrayRef<IValue> operands, int64_t out) {
  const auto size = [&](size_t i, int64_t dimension) {
    return static_cast<double>(operands[i].toTensor().size(dimension));
  };
  if (name == "mm" || name == "bmm") return 2.0 * out * size(0, -1);
  if (name == "addmm" || name == "baddbmm") return 2.0 * out * size(1, -1);
  if (name == "convolution" || name == "convolution_backward") {
    const bool backward = name != "convolution";
    const auto& weight = operands[backward ? 2 : 1].toTensor();
    const double each = static_cast<double>(weight.numel()) / weight.size(0);
    const double outputs = backward ? operands[0].toTensor().numel() : out;
    return (backward ? 4.0 : 2.0) * outputs * each;
  }
  return 0;
}

// The roofline of a kernel, unless its cost was given.
inline Picoseconds cost_of(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands,
    c10::ArrayRef<IValue> results) {
  auto name = op.schema().name().substr(op.schema().name().find("::") + 2);
  if (auto given = settings.kernels.find(name); given != settings.kernels.end())
    return given->second;
  double bytes = 0;
  int64_t out = 0;
  for (const auto& operand : operands)
    each_tensor(operand, [&](const Tensor& t) { bytes += t.defined() ? t.nbytes() : 0; });
  for (const auto& result : results)
    each_tensor(result, [&](const Tensor& t) {
      bytes += t.defined() ? t.nbytes() : 0;
      out = t.defined() ? t.numel() : out;
    });
  const double flops = flops_of(name, operands, out);
  return picoseconds(
      std::max(bytes / settings.bytes_per_s, flops / settings.flops_per_s));
}

// Whether operands of an operator may stay on the host, as on a GPU.
inline bool takes_host_tensors(const std::string& name) {
  return name.find("index") != std::string::npos || name.find("_pack_padded") == 6;
}

// The one device of an operator's operands.
inline int device_of(const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands) {
  std::optional<int> device;
  for (const auto& operand : operands) {
    if (operand.isDevice() && !device) device = index_of(operand.toDevice());
    each_tensor(operand, [&](const Tensor& tensor) {
      if (!tensor.defined()) return;
      if (tensor.is_cpu()) {
        TORCH_CHECK(
            tensor.dim() == 0 || takes_host_tensors(op.schema().name()),
            "Expected all tensors to be on the same device, but found at least two ",
            "devices, emu and cpu! (in ", op.schema().operator_name(), ")");
        return;
      }
      if (tensor.device().type() != device_type) return;
      TORCH_CHECK(
          !device || *device == tensor.device().index() || tensor.dim() == 0,
          "Expected all tensors to be on the same device, but found at least two ",
          "devices, emu:", *device, " and ", tensor.device(), "! (in ",
          op.schema().operator_name(), ")");
      if (!device) device = tensor.device().index();
    });
  }
  return device.value_or(current_device);
}

inline Stack operands_on_cpu(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands, OnCpu& on_cpu, int device) {
  Stack stack;
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto& operand = operands[i];
    if (is_generator(op.schema().arguments()[i]))
      stack.push_back(next_of(operand.toOptional<at::Generator>(), device));
    else if (operand.isDevice())
      stack.push_back(c10::Device(at::kCPU));
    else
      stack.push_back(mapped(operand, std::ref(on_cpu)));
  }
  return stack;
}

inline void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  StraightToKernels straight;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
}

inline void resize_to(const Tensor& tensor, c10::IntArrayRef sizes) {
  auto* impl = tensor.unsafeGetTensorImpl();
  if (tensor.sizes() == sizes) return;
  const size_t bytes = at::detail::computeStorageNbytesContiguous(
      sizes, tensor.element_size(), tensor.storage_offset());
  if (bytes > tensor.storage().nbytes())
    hooks.resizePrivateUse1Bytes(tensor.storage(), bytes);
  impl->set_sizes_contiguous(sizes);
}

// Run now, because only the values say what comes out.
inline Stack run_at_once(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands, int device) {
  queues.synchronize(queues.end_of(device, current_stream(device)));
  OnCpu on_cpu;
  auto stack = operands_on_cpu(op, operands, on_cpu, device);
  run_on_cpu(op, &stack);
  Stack results;
  for (size_t i = 0; i < stack.size(); ++i) {
    if (auto operand = operand_of(op.schema(), i)) {
      results.push_back(operands[*operand]);
      continue;
    }
    results.push_back(mapped(stack[i], [&](const Tensor& from) {
      if (!from.defined()) return from;
      auto to = new_tensor(from.sizes(), from.strides(), from.scalar_type(), device);
      launch(device, {[from, target = on_cpu(to)] { target.copy_(from); }});
      return to;
    }));
  }
  return results;
}

// Memory for the results, which the operator will fill.
inline Stack new_results(const Shapes& shapes, c10::ArrayRef<IValue> operands, int device) {
  Stack results;
  const auto make = [&](const Layout& layout) {
    return layout.defined
        ? new_tensor(layout.sizes, layout.strides, layout.type, device)
        : Tensor();
  };
  for (const auto& result : shapes.results) {
    if (result.operand) {
      results.push_back(operands[*result.operand]);
    } else if (result.is_list) {
      c10::List<Tensor> list;
      for (const auto& layout : result.tensors) list.push_back(make(layout));
      results.push_back(list);
    } else {
      results.push_back(make(result.tensors.front()));
    }
  }
  return results;
}

inline Stack launched(
    const c10::OperatorHandle& op, c10::ArrayRef<IValue> operands, int device) {
  const auto& shapes = shape_cache.of(op, operands);
  if (!shapes.known) return run_at_once(op, operands, device);
  for (const auto& [i, sizes] : shapes.resized) resize_to(operands[i].toTensor(), sizes);
  auto results = new_results(shapes, operands, device);
  OnCpu on_cpu;
  auto stack = operands_on_cpu(op, operands, on_cpu, device);
  std::vector<std::pair<size_t, std::vector<Tensor>>> targets;
  for (size_t i = 0; i < results.size(); ++i) {
    if (shapes.results[i].operand) continue;
    targets.emplace_back(i, std::vector<Tensor>());
    each_tensor(results[i], [&](const Tensor& t) { targets.back().second.push_back(on_cpu(t)); });
  }
  Launch work;
  work.cost = cost_of(op, operands, results);
  work.work = [op, stack = std::move(stack), targets = std::move(targets)] {
    Uncounted uncounted;
    Stack values = stack;
    run_on_cpu(op, &values);
    StraightToKernels straight;
    for (const auto& [i, tensors] : targets) {
      auto target = tensors.begin();
      each_tensor(values[i], [&](const Tensor& value) {
        if (target->defined()) target->copy_(value);
        ++target;
      });
    }
  };
  launch(device, std::move(work));
  return results;
}

// Run `op` with these operands on the device.
inline Stack run(const c10::OperatorHandle& op, Stack operands) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "emu cannot run ",
      op.schema().operator_name(), ": the CPU has no kernel for it");
  const int device = device_of(op, operands);
  c10::DeviceGuard guard(c10::Device(device_type, static_cast<c10::DeviceIndex>(device)));
  return launched(op, operands, device);
}

inline void fallback(const c10::OperatorHandle& op, Stack* stack) {
  auto operands = torch::jit::pop(*stack, op.schema().arguments().size());
  for (auto& result : run(op, std::move(operands))) stack->push_back(std::move(result));
}

}  // namespace emulated
