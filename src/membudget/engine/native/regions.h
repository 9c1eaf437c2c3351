// The Python classes of the rerun engine, whose docstrings explain every attribute.

#pragma once

#include "hooks.h"

namespace membudget {

inline Class rerun_handle;
namespace saved {
inline Slot address, tensor, version;
}

inline Class rerun_class;
namespace rerun {
inline Slot cursor, externals, failure, fingerprints, handles, is_guarded, last_needed,
    may_stop, metadata, recording, site, stopped, trace;

// As `Rerun._release`.
inline void release(PyObject* of) {
  for (Slot* slot : {&fingerprints, &handles, &metadata, &recording}) {
    slot->clear(of);
  }
  failure.set(of, Py_None);
}
}

inline Class region_frame;
namespace region {
inline Slot calls, contexts, fingerprints, finished, function, handles, holds, is_new,
    lock, metadata, nested_backward, options, statistics, surroundings, trace;
}

inline Class region_options;
namespace options {
inline Slot decisions, early_stop, guards, is_instrumented, may_follow, offload, policy,
    preserve_rng_state, strict, use_reentrant, verify;
}

inline Class surroundings_class;
namespace around {
inline Slot ambient, arguments, autocast, function, is_checked, is_lazy, needs_repair,
    noted, private_, random_log, reads, runs_torchscript, sources, stream, trainable;
}

inline Class held_arguments;
namespace given {
inline Slot alone, args, is_nested, kwargs, others, tensors;
}

inline Class held_tensor;
namespace one_held {
inline Slot alias, changed_by_region, place, version;
}

inline Class region_calls;
namespace calls {
inline Slot count, fills_late, is_settled, owner, paths, sampling;
}

inline Class region_statistics;
namespace statistics {
inline Slot label, recomputes;
}

inline Class calls_owner;
namespace owner {
inline Slot adds_gradients, differentiates;
}

inline PyObject *as_it_is, *autocast_class, *autocast_state, *by_backward, *code_slots,
    *fills_what_it_saved, *first_place, *forward_ad, *global_sources, *inert_types,
    *is_shared, *lock_class, *module_type, *nothing_reached, *reach, *recomputing,
    *release_in_time, *stop_recompute, *sys_modules, *torch_sources;

// Names of methods and attributes.
inline PyObject *begin_name, *check_end_name, *check_external_name, *close_name,
    *current_level_name, *drop_name, *dtype_name, *enter_ambient_name, *enter_state_name,
    *finish_name, *give_up_name, *judge_name, *missing_name, *note_forward_end_name,
    *note_new_name, *note_reached_name, *numpy_random_name, *rebuild_name, *rrelu_name,
    *run_begun_name, *shape_name, *torch_function_name, *training_name;

inline bool is_module(PyObject* value) {
  return PyObject_TypeCheck(value, reinterpret_cast<PyTypeObject*>(module_type));
}

} // namespace membudget
