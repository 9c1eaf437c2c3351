// Counts the bytes that torch's CPU allocator hands out and takes back.
//
// The counter stands in front of the allocator that was there, which does the work, so
// that it changes neither addresses nor what torch's profiler sees. Of memory that was
// handed out before, it counts the storages that it is told of when counting begins
// (`adopt`). Where these were allocated uncounted, they are released past it: each count
// looks how much they take by then.

#include <Python.h>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/StorageImpl.h>

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

struct Block {
  std::int64_t bytes;
  c10::Allocator* from;  // Another may stand there when the block is released.
  bool is_counted = true;  // Not if nobody told of it when counting began anew.
};

std::mutex mutex;
std::unordered_map<void*, Block> blocks;
std::int64_t live_bytes = 0;
std::int64_t most_bytes = 0;
std::int64_t failed_count = 0;
c10::Allocator* inner = nullptr;
thread_local std::int64_t calls_here = 0;

constexpr std::uint8_t priority = 200;

void release(void* memory) {
  c10::Allocator* from = inner;
  {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = blocks.find(memory);
    if (found != blocks.end()) {
      live_bytes -= found->second.is_counted ? found->second.bytes : 0;
      from = found->second.from;
      blocks.erase(found);
    }
  }
  from->raw_deallocate(memory);
}

struct Counter final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    ++calls_here;
    void* memory = nullptr;
    try {
      memory = inner->raw_allocate(bytes);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex);
      ++failed_count;
      throw;
    }
    if (memory != nullptr) {
      std::lock_guard<std::mutex> lock(mutex);
      blocks[memory] = {static_cast<std::int64_t>(bytes), inner};
      live_bytes += static_cast<std::int64_t>(bytes);
      most_bytes = std::max(most_bytes, live_bytes);
    }
    return {memory, memory, &release, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

struct Adopted {
  WeakStorage storage;  // As long as this is here, no other one has its address.
  std::int64_t bytes;
};

std::unordered_map<c10::StorageImpl*, Adopted> adopted;

void* memory_of(c10::StorageImpl* storage) {
  return storage->_mutable_data_ptr_no_checks().get();
}

std::int64_t bytes_of(const c10::StorageImpl* storage) {
  return storage->sym_nbytes().maybe_as_int().value_or(0);
}

void adopt_one(c10::StorageImpl* storage) {
  std::lock_guard<std::mutex> lock(mutex);
  auto block = blocks.find(memory_of(storage));
  if (block != blocks.end()) {
    live_bytes += block->second.is_counted ? 0 : block->second.bytes;
    block->second.is_counted = true;
  } else if (!adopted.count(storage)) {
    auto held = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    adopted.emplace(storage, Adopted{WeakStorage(held), bytes_of(storage)});
    live_bytes += bytes_of(storage);
  }
}

void forget_all() {
  std::lock_guard<std::mutex> lock(mutex);
  for (auto& [memory, block] : blocks) {
    block.is_counted = false;
  }
  adopted.clear();
  live_bytes = most_bytes = 0;
}

// Looks what adopted storages take by now: they may be gone, or resized.
void look_again() {
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> held;  // Until the mutex is free:
  std::lock_guard<std::mutex> lock(mutex);  // what ends a storage takes it.
  for (auto found = adopted.begin(); found != adopted.end();) {
    auto storage = found->second.storage.lock();
    bool is_block = storage && blocks.count(memory_of(storage.get()));
    std::int64_t bytes = storage && !is_block ? bytes_of(storage.get()) : 0;
    live_bytes += bytes - found->second.bytes;
    found->second.bytes = bytes;
    found = storage ? std::next(found) : adopted.erase(found);
    held.push_back(std::move(storage));
  }
  most_bytes = std::max(most_bytes, live_bytes);
}

// It lives until the process ends: tensors that it counted may outlive the counting.
Counter& counter() {
  static auto* made = new Counter();
  return *made;
}

// Whether an allocator is the counter, or asks it in turn.
bool asks_counter(c10::Allocator* allocator) {
  std::int64_t before = calls_here;
  try {
    allocator->allocate(1);
  } catch (...) {  // Even so, the counter was asked or was not.
  }
  return calls_here > before;
}

PyObject* start(PyObject*, PyObject*) {
  c10::Allocator* current = c10::GetCPUAllocator();
  if (!asks_counter(current)) {
    inner = current;
    c10::SetCPUAllocator(&counter(), priority);
  }
  return PyBool_FromLong(asks_counter(c10::GetCPUAllocator()));
}

// adopt(storages, anew): counts storages; anew, these alone.
PyObject* adopt(PyObject*, PyObject* args) {
  PyObject* storages;
  int is_anew;
  if (!PyArg_ParseTuple(args, "O!p", &PyList_Type, &storages, &is_anew)) {
    return nullptr;
  }
  if (is_anew) {
    forget_all();
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(storages); ++i) {
    adopt_one(static_cast<c10::StorageImpl*>(PyLong_AsVoidPtr(PyList_GET_ITEM(storages, i))));
  }
  look_again();
  Py_RETURN_NONE;
}

PyObject* stop(PyObject*, PyObject*) {
  // If another allocator stands in front by now, it goes on to use this one.
  if (c10::GetCPUAllocator() == &counter()) {
    c10::SetCPUAllocator(inner, priority);
  }
  Py_RETURN_NONE;
}

PyObject* live(PyObject*, PyObject*) {
  look_again();
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(live_bytes);
}

PyObject* most(PyObject*, PyObject*) {
  look_again();
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(most_bytes);
}

PyObject* failed(PyObject*, PyObject*) {
  std::lock_guard<std::mutex> lock(mutex);
  return PyLong_FromLongLong(failed_count);
}

PyObject* restart(PyObject*, PyObject*) {
  look_again();
  std::lock_guard<std::mutex> lock(mutex);
  most_bytes = live_bytes;
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"adopt", adopt, METH_VARARGS, "Count storages, by address; anew, these alone."},
    {"start", start, METH_NOARGS, "Count from now on; return whether that is possible."},
    {"stop", stop, METH_NOARGS, "Count no more allocations."},
    {"live", live, METH_NOARGS, "Return the live bytes that were counted."},
    {"most", most, METH_NOARGS, "Return the most of them since the last restart."},
    {"failed", failed, METH_NOARGS, "Return how many allocations have failed."},
    {"restart", restart, METH_NOARGS, "Let the most be what is live now."},
    {nullptr, nullptr, 0, nullptr},
};

// Holds the mutex while a process forks: if another thread held it then, no thread of the
// child would ever free it.
bool is_ready_to_fork() {
  static const int status = pthread_atfork(
      [] { mutex.lock(); }, [] { mutex.unlock(); }, [] { mutex.unlock(); });
  return status == 0;
}

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_counter", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit__counter() {
  return is_ready_to_fork() ? PyModule_Create(&definition) : PyErr_NoMemory();
}
