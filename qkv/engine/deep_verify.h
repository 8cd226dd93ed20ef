// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Whether a context's pages hold what its model makes of its token ids. Checksums say that pages are as they were written;
// this reads a few of the tokens again and compares: the keys and values in the pages, and the next token's distribution
// over them. A spot check with a tolerance, for people and audits; nothing attaches by it. One thread (and the
// sequences' own).

#include <memory>
#include <string>
#include <vector>

#include "qkv/engine/sequence.h"

namespace qkv {

// Errors are mean squared differences relative to the mean square, of the layer where that is largest. A limit is four
// times what the same model shows on the context's own first tokens between reading them at once and reading some of them
// over pages in the context's codec: that is what codec and reading in pieces do. To that
// comes 5e-3 for the rounding of activations. For distributions: ten times, and 0.02 nats.
struct DeepCheck {
  std::string where;  // "first 64 tokens", "last 64 tokens"
  double k_error = 0, k_limit = 0;
  double v_error = 0, v_limit = 0;
  double kl = -1, kl_limit = 0;  // nats, mean over a few positions; -1: not looked at
  bool ok() const { return k_error <= k_limit && v_error <= v_limit && kl <= kl_limit; }
};

// `n_tokens`: how many to read again at either end, at least 2; fewer if the context is shorter. The checks of pages and
// card are Attach's. Errors: those, kInvalidArgument when the context has fewer than 2 tokens, kExhausted.
Result<std::vector<DeepCheck>> VerifyDeep(const std::shared_ptr<const Model>& model, const Context& context,
                                          int n_tokens, int n_threads);

}  // namespace qkv
