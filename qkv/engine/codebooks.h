// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The codebooks of the codecs pq4 and pq2 (codec/pq.h) of a model: learned on a text, kept in a file beside the model. They
// are a constant of the model and no part of a context; a context's card names them by digest if its pages need them.

#include <functional>
#include <memory>
#include <span>
#include <string>

#include "qkv/codec/pq.h"
#include "qkv/engine/sequence.h"

namespace qkv {

// A file beside the model: its directory, its weights' digest and ".qkvpq".
std::string CodebooksPath(const Model& model);
// Errors: kDenied, kIo; there is then what was there before.
Status WriteCodebooks(const PqCodebooks& codebooks, const std::string& path);
// Errors: kNotFound (how to make some), kIncompatible (another model's, another version), kCorrupt, kDenied, kIo.
Result<std::shared_ptr<const PqCodebooks>> ReadCodebooks(const Model& model, const std::string& path);

// Whether they are for heads like this model's.
bool Fits(const PqCodebooks& codebooks, const Model& model);

// Reads `tokens` in stretches of n_stretch over exact pages, each as a context of its own: K without the stretch's mean and
// first token, in the rotated frame. `on_progress`: of tokens read, then (from 0 on again) of layers learned. Errors:
// kInvalidArgument when there are too few, Forward's.
Result<PqCodebooks> LearnCodebooks(const std::shared_ptr<const Model>& model, std::span<const Token> tokens,
                                   int n_stretch, int n_threads,
                                   const std::function<void(size_t done, size_t total)>& on_progress = {});

}  // namespace qkv
