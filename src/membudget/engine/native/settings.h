// Settings that choose kernels, read again only if one has changed: as `read` of
// `_torch_settings.py`, which lists them.

#pragma once

#include "tape.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/DefaultDtype.h>

#if __has_include(<torch/headeronly/version.h>)
#include <torch/headeronly/version.h>
#endif

#include <array>
#include <limits>

namespace membudget {

inline bool has_cuda_settings = true;
inline PyObject *einsum_settings, *mha_settings, *read_settings;
inline PyObject *enabled_name, *fastpath_name, *strategy_name;

// Python objects of which the settings that were read last hold a reference.
inline long identity_in(PyObject* settings, PyObject* name) {
  return reinterpret_cast<long>(PyDict_GetItemWithError(settings, name));
}

#if defined(TORCH_VERSION_MINOR) && TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 13

inline long sdp_order(at::Context& context) {
  long order = 0;
  for (auto backend : context.sDPPriorityOrder()) {
    order = order * 16 + static_cast<long>(backend);
  }
  return order;
}

// A number for each setting.
inline auto settings_mark() {
  at::Context& c = at::globalContext();
  volatile double smallest = std::numeric_limits<double>::min();
  auto onednn = [&](at::Float32Op op) {
    return static_cast<long>(c.float32Precision(at::Float32Backend::MKLDNN, op));
  };
  return std::array{
      static_cast<long>(c10::get_default_dtype_as_scalartype()),
      static_cast<long>(at::get_num_threads()), static_cast<long>(smallest * 0.5 == 0.0),
      identity_in(einsum_settings, enabled_name),
      identity_in(einsum_settings, strategy_name),
      identity_in(mha_settings, fastpath_name),
      static_cast<long>(c.deterministicAlgorithms()),
      static_cast<long>(c.deterministicAlgorithmsWarnOnly()), sdp_order(c),
      static_cast<long>(c.userEnabledFlashSDP()),
      static_cast<long>(c.userEnabledMemEfficientSDP()),
      static_cast<long>(c.userEnabledMathSDP()),
      static_cast<long>(c.userEnabledCuDNNSDP()),
      static_cast<long>(c.userEnabledFA3SDP()),
      static_cast<long>(c.userEnabledOverrideableSDP()),
      static_cast<long>(c.userEnabledMkldnn()),
      static_cast<long>(c.deterministicMkldnn()),
      static_cast<long>(c.userEnabledNNPACK()), static_cast<long>(c.qEngine()),
      static_cast<long>(c.userEnabledCuDNN()), static_cast<long>(c.benchmarkCuDNN()),
      static_cast<long>(c.deterministicCuDNN()),
      static_cast<long>(c.allowFP16BF16ReductionMathSDP()),
      static_cast<long>(c.allowFP16ReductionCPU()),
      static_cast<long>(c.deterministicFillUninitializedMemory()),
      static_cast<long>(c.float32MatmulPrecision()), onednn(at::Float32Op::MATMUL),
      onednn(at::Float32Op::CONV), onednn(at::Float32Op::RNN)};
}

// The same object as long as no setting has changed.
inline Ref settings_now() {
  static decltype(settings_mark()) noted;
  static Ref& last = *new Ref();  // Never freed.
  if (has_cuda_settings) {
    return Ref::made(PyObject_CallNoArgs(read_settings));
  }
  try {
    auto mark = settings_mark();
    if (last == nullptr || mark != noted) {
      last = Ref::made(PyObject_CallNoArgs(read_settings));
      noted = mark;
    }
    return last;
  } catch (const c10::Error&) {  // As `read` has it, of older and newer precisions.
    return Ref::made(PyObject_CallNoArgs(read_settings));
  }
}

#else

inline Ref settings_now() {
  return Ref::made(PyObject_CallNoArgs(read_settings));
}

#endif

// settings(): as `read`.
inline PyObject* settings(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  return settings_now().release();
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
