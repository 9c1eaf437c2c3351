// Streams of an accelerator: whether work is launched on the one of the forward.

#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/Stream.h>

#include "python.h"

namespace membudget {

// Whether a `torch.Stream` is the current one; so is `None`, without an accelerator.
inline bool is_current(PyObject* stream) {
  if (stream == Py_None) {
    return true;
  }
  if (!PyObject_TypeCheck(stream, THPStreamClass)) {
    return false;  // A stream of a test; Python can tell.
  }
  auto* wanted = reinterpret_cast<THPStream*>(stream);
  c10::impl::VirtualGuardImpl guard(static_cast<c10::DeviceType>(wanted->device_type));
  c10::Device device = guard.getDevice();
  return device.index() == wanted->device_index &&
      guard.getStream(device).id() == wanted->stream_id;
}

} // namespace membudget
