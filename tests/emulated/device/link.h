// Copies: over the link to the host, between devices, and on one.
//
// A copy of page-locked memory is queued, and the host goes on; pageable memory is staged
// on the way to the device, and the host waits on the way back. Each direction of the
// link is an engine of its own, so that copies overlap kernels, and each other only in
// opposite directions.

#pragma once

#include "fallback.h"

namespace emulated {

inline Picoseconds link_cost(double bytes) {
  return settings.link_latency + picoseconds(bytes / settings.link_bytes_per_s);
}

// Page-locked memory as a tensor that does not own it: the host may free it early.
inline Tensor unowned(const Tensor& tensor) {
  return laid_out(tensor, borrowed(tensor), c10::DispatchKey::CPU);
}

inline void copy_over_link(const Tensor& from, const Tensor& to, bool non_blocking) {
  const bool up = from.is_cpu();
  const auto& on_host = up ? from : to;
  const int device = (up ? to : from).device().index();
  auto* pinned = pinned_memory.find(on_host.storage().data());
  OnCpu on_cpu;
  const auto seen = [&](const Tensor& t) { return t.is_cpu() ? unowned(t) : on_cpu(t); };
  Launch copy;
  // Staged by the host before the launch, like any pageable memory on its way up.
  const auto source = up && !pinned ? from.detach().clone() : seen(from);
  copy.work = [source, target = seen(to)] {
    StraightToKernels straight;
    target.copy_(source);
  };
  copy.cost = link_cost(static_cast<double>(from.nbytes()));
  copy.engine = up ? Engine::to_device : Engine::to_host;
  const auto position = launch(device, std::move(copy));
  if (pinned) {
    Lock lock;
    pinned->until.push_back(position);
  }
  if (!pinned || !non_blocking) queues.synchronize(position);
}

inline void copy_on_devices(const Tensor& from, const Tensor& to) {
  const int source = from.device().index(), target = to.device().index();
  const bool one = source == target;
  if (!one) wait_for(source, current_stream(source), queues.end_of(target, current_stream(target)));
  OnCpu on_cpu;
  Launch copy;
  copy.work = [a = on_cpu(from), b = on_cpu(to)] {
    StraightToKernels straight;
    b.copy_(a);
  };
  const auto bytes = static_cast<double>(from.nbytes());
  copy.cost = one ? picoseconds(2 * bytes / settings.bytes_per_s) : link_cost(bytes);
  const auto position = launch(source, std::move(copy));
  if (!one) wait_for(target, current_stream(target), position);
}

inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  if (!to.numel()) return to;
  const auto source = from.expand(to.sizes());
  const auto device = to.is_cpu() ? from.device() : to.device();
  c10::DeviceGuard guard(device);
  if (from.is_cpu() || to.is_cpu())
    copy_over_link(source, to, non_blocking);
  else
    copy_on_devices(source, to);
  return to;
}

}  // namespace emulated
