// A process group whose collectives happen in the simulated network.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <string>
#include <vector>

namespace foretrain {

using Backend = c10::intrusive_ptr<c10d::Backend>;

// A backend called `name` ("nccl", "gloo") of the world ranks `ranks`, among which this process is number `rank`.
Backend make_group(const std::string& name, int rank, std::vector<std::int32_t> ranks,
                   c10::intrusive_ptr<c10d::Backend::Options> options);

// Announces a group to the executor, of which this process need not be a member. Groups of one `family` were made together.
std::int64_t announce_group(const std::vector<std::int32_t>& ranks, std::int64_t family);

}  // namespace foretrain
