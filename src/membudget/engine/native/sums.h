// The fingerprint of a tensor in one pass: as `_add` in `state/bits.py`, which says what
// the two sums are.

#pragma once

#include <ATen/ATen.h>

#include "tracking.h"

namespace membudget {

struct Sums {
  uint64_t mixed = 0;
  uint64_t plain = 0;
  uint64_t place = 0; // The number of the latest element times `_SPREAD`.
};

inline uint64_t mix(uint64_t word) {
  word *= 0xFF51AFD7ED558CCD;
  return word ^ (word >> 32);
}

template <typename Element>
void add_row(Sums& sums, const Element* first, int64_t count, int64_t stride) {
  Sums found = sums; // In registers.
  for (int64_t i = 0; i < count; ++i) {
    auto word = static_cast<uint64_t>(static_cast<int64_t>(first[i * stride]));
    found.place += 0x9E3779B97F4A7C15;
    found.mixed += mix(mix(word + found.place));
    found.plain += word;
  }
  sums = found;
}

// Adds all elements from dimension `dim` on, in order, whatever their strides.
template <typename Element>
void add_elements(Sums& sums, const Element* first, const at::Tensor& of, int64_t dim) {
  int64_t size = of.size(dim), stride = of.stride(dim);
  if (dim + 1 == of.dim()) {
    add_row(sums, first, size, stride);
    return;
  }
  for (int64_t i = 0; i < size; ++i) {
    add_elements(sums, first + i * stride, of, dim + 1);
  }
}

template <typename Element>
Sums sums_of(const at::Tensor& bits) {
  Sums sums;
  auto* first = bits.const_data_ptr<Element>();
  if (bits.is_contiguous()) {
    add_row(sums, first, bits.numel(), 1);
  } else if (bits.numel() > 0) {
    add_elements(sums, first, bits, 0);
  }
  return sums;
}

inline Sums sums_of_any(const at::Tensor& bits) {
  switch (bits.scalar_type()) {
    case at::kChar:
      return sums_of<int8_t>(bits);
    case at::kShort:
      return sums_of<int16_t>(bits);
    case at::kInt:
      return sums_of<int32_t>(bits);
    default:
      return sums_of<int64_t>(bits);
  }
}

// sums(bits): both sums of a tensor of integers on the CPU; `None` if it has no memory,
// as zeros that autograd does not allocate.
inline PyObject* sums(PyObject*, PyObject* object) {
  HANDLE_TH_ERRORS
  const at::Tensor bits = THPVariable_Unpack(object);
  if (!is_plain(bits)) {
    Py_RETURN_NONE;
  }
  Sums found;
  {
    WithoutGil released;
    found = sums_of_any(bits);
  }
  auto signed_of = [](uint64_t sum) { return static_cast<long long>(sum); };
  return Py_BuildValue("LL", signed_of(found.mixed), signed_of(found.plain));
  END_HANDLE_TH_ERRORS
}

} // namespace membudget
