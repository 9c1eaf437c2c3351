// Where the elements of a tensor lie in its memory.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

namespace membudget {

struct Geometry {
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;

  static Geometry of(const at::Tensor& tensor) {
    return {tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(),
            tensor.storage_offset()};
  }

  bool operator==(const Geometry& other) const {
    return dtype == other.dtype && offset == other.offset && sizes == other.sizes &&
        strides == other.strides;
  }
};

// The elements of a view: the first, and by stride, from the largest, how many there are.
struct Extent {
  int64_t offset;
  std::map<int64_t, int64_t, std::greater<>> sizes;

  int64_t size(int64_t stride) const {
    auto found = sizes.find(stride);
    return found == sizes.end() ? 1 : found->second;
  }
};

// Where two indices have one stride, they meet, as with a stride of 0.
inline Extent extent_of(const Geometry& geometry) {
  Extent extent{geometry.offset, {}};
  for (size_t i = 0; i < geometry.sizes.size(); ++i) {
    bool is_index = geometry.sizes[i] != 1;
    if (is_index && !extent.sizes.emplace(geometry.strides[i], geometry.sizes[i]).second) {
      return {geometry.offset, {{0, 0}}};
    }
  }
  return extent;
}

// As `_are_parts`: whether two are apart in an array with a given first element.
inline bool are_parts(const Extent& one, const Extent& other, int64_t corner) {
  auto strides = one.sizes;
  strides.insert(other.sizes.begin(), other.sizes.end());
  int64_t start = one.offset - corner, other_start = other.offset - corner, room = -1;
  bool are_apart = false;
  for (const auto& [stride, _] : strides) {
    if (stride == 0) {
      return false;
    }
    int64_t begin = start / stride, other_begin = other_start / stride;
    int64_t end = begin + one.size(stride), other_end = other_begin + other.size(stride);
    // They are no parts of this array if a row reaches into the next one.
    if (room >= 0 && std::max(end, other_end) * stride > room) {
      return false;
    }
    are_apart |= end <= other_begin || other_end <= begin;
    start %= stride;
    other_start %= stride;
    room = stride;
  }
  return are_apart || start != other_start;
}

// As `are_apart`: whether two views of one memory surely share no element.
inline bool are_apart(const Geometry& one, const Geometry& other) {
  Extent extent = extent_of(one), other_extent = extent_of(other);
  int64_t first = std::min(one.offset, other.offset);
  return one.dtype == other.dtype &&
      (are_parts(extent, other_extent, 0) || are_parts(extent, other_extent, first));
}

inline bool are_apart(const at::Tensor& one, const at::Tensor& other) {
  return are_apart(Geometry::of(one), Geometry::of(other));
}

} // namespace membudget
