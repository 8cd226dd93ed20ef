// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Small files that are there whole or not at all. Any thread, any process.

#include <cstddef>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "qkv/base/error.h"

namespace qkv {

// The parts one after the other; written beside the target and renamed, so that a failure leaves what was there. Errors:
// kDenied, kIo.
Status WriteWholeFile(const std::string& path, std::initializer_list<std::span<const std::byte>> parts);

// Errors: kNotFound, kDenied, kIo; kCorrupt when it is no regular file, larger than max_bytes, or changes meanwhile.
Result<std::vector<std::byte>> ReadWholeFile(const std::string& path, size_t max_bytes);

}  // namespace qkv
