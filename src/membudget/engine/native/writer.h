// Write the tape of a call that has followed a route, as if it had been recorded.

#pragma once

#include "trip.h"
#include "write.h"

namespace membudget {

inline Ref new_handle(Ref value) {
  Ref made = unvisited(handle_class.make());
  handle::value.set(made, std::move(value));
  handle::served.set(made, zero);
  handle::stage.set_number(made, -1);
  handle::fingerprint.set(made, Py_None);
  handle::saved_version.set(made, Py_None);
  return made;
}

class Writer {
 public:
  // `tracker` is null in the backward.
  Writer(Trip& trip, PyObject* tracker)
      : trip_(trip), route_(*trip.route), tracker_(tracker), made_(route_.values.size()) {}

  // Returns how many operations are on the tape.
  long write() {
    c10::impl::ExcludeDispatchKeyGuard unseen(c10::DispatchKey::Python);
    forget_overwritten();
    for (size_t i = 0; i < trip_.at; ++i) {
      before_.push_back(clock_);
      if (tracker_ != nullptr || trip_.steps[i] > 0) {
        write_step(i);
      }
      write_outside(i);
    }
    for (size_t i = 0; i < trip_.stops.size(); ++i) {
      if (Stop* stop = trip_.stops[i]) {
        stop->handle = new_handle(read(route_.saves[i].value));
        handle::stage.set_number(stop->handle, route_.saves[i].stage);
        check(PyList_Append(replayer::handles.of(trip_.replayer), weak(stop->handle)));
      }
    }
    return clock_;
  }

  // The value on the tape, or null.
  PyObject* written(size_t number) const { return made_[number]; }

  // How many operations the tape had before a step.
  long before(size_t step) const { return before_[step]; }

 private:
  // A tensor that lives no longer has a value from before the last write to its memory.
  void forget_overwritten() {
    auto last = last_writes(trip_);
    for (size_t i = 0; i < trip_.values.size(); ++i) {
      if (!is_held(trip_, i) && is_overwritten(trip_, last, i)) {
        trip_.values[i].live.reset();
      }
    }
  }

  // The tensor of a value, if it lives, in the memory that it was in.
  at::Tensor living(size_t number) {
    const Met& met = trip_.values[number];
    if (tracker_ == nullptr || !met.live) {
      return at::Tensor();
    }
    at::Tensor tensor(met.live->lock());
    return tensor.defined() && is_where_it_was(number, tensor) ? tensor : at::Tensor();
  }

  // False after `.data =`.
  bool is_where_it_was(size_t number, const at::Tensor& tensor) {
    return storage_of(tensor) == storage_of(trip_.values[number]);
  }

  // What to hold for a value that no step makes again; undefined if it is gone.
  at::Tensor kept(size_t number) {
    at::Tensor tensor = trip_.values[number].tensor;
    if (!tensor.defined() && (tensor = living(number)).defined()) {
      return alias_of(tensor, wrapped(tensor));
    }
    return tensor;
  }

  // The memory that a step makes, or that of what it is a view of.
  Ref memory_of(size_t number, PyObject* root, PyObject* dtype) {
    const RouteValue& known = route_.values[number];
    Ref& memory = memories_[storage_of(trip_.values[number])];
    if (memory == nullptr || known.root < 0) {
      memory = new_memory(root, dtype);
    }
    return memory;
  }

  void hold_kept(size_t number, PyObject* value, const at::Tensor& tensor) {
    hold(value, wrapped(tensor));
    if (tracker_ == nullptr) {
      value::version.set_number(value, trip_.values[number].version);
    }
    if (tracker_ == nullptr || is_own_alias(tensor, wrapped(tensor))) {
      value::address.set_number(value, reinterpret_cast<long>(storage_of(trip_.values[number])));
    }
  }

  void enter_at(const at::Tensor& tensor, PyObject* value, PyObject* memory) {
    auto address = membudget::number(address_of(tensor));
    enter(tracker_, tensor, wrapped(tensor), value, memory, address);
  }

  // A value that stays in memory; none if that is gone.
  void write_held(size_t number, Ref value) {
    at::Tensor tensor = kept(number);
    if (!tensor.defined()) {
      return;
    }
    hold_kept(number, value, tensor);
    if (tracker_ != nullptr && is_where_it_was(number, tensor)) {
      bool is_view = route_.values[number].root >= 0;  // Of what is gone.
      Ref memory = memory_of(number, is_view ? Py_None : (PyObject*)value, Py_None);
      memory::root.set(memory, Py_None);
      append(memory::sources, memory, weak(value));
      // What is held is no living tensor: its entry would hold it until the region ends.
      if (at::Tensor alive = living(number); alive.defined()) {
        enter_at(alive, value, memory);
      }
    }
    made_[number] = std::move(value);
  }

  // A value from outside the region; none if it is gone.
  void write_source(size_t number) {
    at::Tensor alive = living(number);
    at::Tensor tensor = alive.defined() ? alive : trip_.values[number].tensor;
    if (tracker_ != nullptr && tensor.defined() && is_where_it_was(number, tensor)) {
      Ref entry = entry_of(tracker_, tensor, wrapped(tensor));
      made_[number] = Ref::to(entry::value.of(entry));
      memories_[storage_of(trip_.values[number])] = Ref::to(entry::memory.of(entry));
    } else {
      Ref source = new_value(Py_None, 0, Py_None);
      value::is_input.set(source, Py_True);
      write_held(number, std::move(source));
    }
  }

  PyObject* value_at(size_t number) {
    if (made_[number] == nullptr && route_.values[number].step < 0) {
      write_source(number);
    } else if (made_[number] == nullptr && tracker_ == nullptr && is_held(trip_, number)) {
      write_held(number, new_value(Py_None, 0, Py_None));  // Its step is not needed.
    }
    return made_[number];
  }

  // A value that a replay may read.
  Ref read(size_t number) {
    Ref value = Ref::to(value_at(number));
    TORCH_CHECK(value != nullptr, "a saved tensor has lost its value");
    if (tracker_ != nullptr && !value::is_used.is_true(value)) {
      value::is_used.set(value, Py_True);
      need(tracker_, value);
      need(tracker_, root_of(value));
    }
    return value;
  }

  // The values that a step reads; null if one is gone, so that it cannot run again.
  Ref inputs_of(const Step& step) {
    for (size_t input : step.inputs) {
      if (value_at(input) == nullptr) {
        return Ref();
      }
    }
    Ref inputs = new_list();
    for (size_t input : step.inputs) {
      bool is_read = !step.is_view && !(step.writes() && input == step.inputs[0]);
      check(PyList_Append(inputs, is_read ? read(input) : Ref::to(made_[input])));
    }
    return inputs;
  }

  void write_step(size_t i) {
    const Step& step = route_.steps[i];
    Ref inputs = inputs_of(step);
    Ref operation;
    if (step.writes_held()) {
      return;
    }
    if (inputs != nullptr) {
      if (step.part >= 0) {
        Ref memory = Ref::to(made_[step.inputs[0]]);
        check(PyList_SetItem(inputs, 0, part_of(step, memory).release()));
      }
      operation = new_operation(
          step.overload, inputs, CallBox::make(call_of(trip_, i)), membudget::number(++clock_),
          membudget::number(step.is_rebased() ? 0 : step.place));
      operation::grad_enabled.set(operation, step.grad_enabled ? Py_True : Py_False);
      operation::default_dtype.set(operation, python_dtype(trip_.dtype));
      if (trip_.drawn[i] != nullptr) {
        operation::drawn.set(operation, trip_.drawn[i]);
      }
    }
    if (step.writes()) {
      write_written(operation, step);
      return;
    }
    for (size_t output = 0; output < step.outputs.size(); ++output) {
      if (step.outputs[output] >= 0) {
        write_output(operation, step, static_cast<long>(output));
      }
    }
  }

  // Notes what a step has overwritten that no replay makes.
  void write_outside(size_t i) {
    for (const Overwritten& written : trip_.written) {
      Ref memory;
      for (const Weak& weak : written.tensors) {
        at::Tensor tensor(written.step == i && tracker_ != nullptr ? weak.lock() : nullptr);
        if (tensor.defined()) {
          Ref entry = entry_of(tracker_, tensor, wrapped(tensor));
          memory = Ref::to(entry::memory.of(entry));
        }
      }
      if (memory != nullptr) {
        after_write(memory, Py_None);
      }
    }
  }

  // A view of memory: the part of it that a step overwrites.
  Ref part_of(const Step& step, const Ref& memory) {
    Ref inputs = new_list();
    check(PyList_Append(inputs, memory));
    Ref operation = new_operation(
        view_operator, inputs, CallBox::make(view_call(*route_.values[step.part].geometry)),
        membudget::number(++clock_), zero);
    return new_output(operation, 0, root_of(memory));
  }

  // As `observe_write`.
  void write_written(const Ref& operation, const Step& step) {
    size_t number = step.outputs[1];
    if (operation == nullptr || route_.values[number].is_kept) {
      write_held(number, new_value(Py_None, 1, Py_None));
      return;
    }
    note_target(operation);
    write_made(number, new_output(operation, 1, Py_None));
  }

  void write_output(const Ref& operation, const Step& step, long index) {
    size_t number = step.outputs[index];
    const RouteValue& known = route_.values[number];
    if (operation == nullptr || known.is_kept) {
      write_held(number, new_value(Py_None, index, Py_None));
      return;
    }
    PyObject* root = known.root < 0 ? Py_None : owner_of(step, known.root);
    write_made(number, new_output(operation, index, root));
  }

  // What owns the memory that a step views: `root`, or a view of it if that alone is left.
  PyObject* owner_of(const Step& step, long root) {
    for (size_t input : step.inputs) {
      if (membudget::root_of(route_, input) == root && made_[root] == nullptr) {
        return root_of(made_[input]);
      }
    }
    return root_of(value_at(root));
  }

  // A value that its step makes again.
  void write_made(size_t number, const Ref& value) {
    made_[number] = value;
    if (tracker_ == nullptr || !trip_.values[number].live) {
      return;
    }
    at::Tensor tensor = living(number);
    PyObject* dtype = python_dtype(route_.values[number].dtype);
    Ref memory = memory_of(number, root_of(value), dtype);
    if (tensor.defined()) {
      enter_at(tensor, value, memory);
    }
  }

  Trip& trip_;
  const Route& route_;
  PyObject* tracker_;
  long clock_ = 0;
  std::vector<Ref> made_;
  std::vector<long> before_;
  std::unordered_map<const c10::StorageImpl*, Ref> memories_;
};

} // namespace membudget
