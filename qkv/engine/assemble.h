// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Several contexts and a prompt behind what a sequence has read: as pages where they may be used so, else as tokens.
// Here `auto` decides how far it repairs (splice.h). One thread: the sequence's.

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "qkv/engine/sequence.h"
#include "qkv/engine/splice.h"

namespace qkv {

// Part of what is to be read.
struct ContextPiece {
  const Context* context = nullptr;  // null: `tokens` are read
  int first_token = 0;               // as SpliceSource's
  std::vector<Token> tokens;
  SplicePolicy policy;  // not kOff; kExactOnly is for whoever has found that it is exact
};

struct Assembled {
  SpliceResult splice;  // of all pieces together, as they stand now
  // `auto`: the rung that it stopped at, and what was measured there; else nothing.
  std::optional<SplicePolicy> chosen;  // kHide or kRepair; with repair kRepairAll all was read again
  double probe_kl = 0;                 // nats; between the rung and the one before it
};

// The probe of `auto`. With each rung (hide, repair=32, repair=64, everything read again) the contexts are put together
// and the prompt is read; the distributions of the next token behind each of the prompt's last kProbeTokens tokens are
// compared with those of the rung before: the mean of KL(this || before). At kProbeAgreement nats or less it stops, and
// what was just put together stays. So it costs at least one repair of 32 and reading the prompt twice, and never
// ends at `hide`, which would save nothing by then.
inline constexpr int kProbeTokens = 16;
inline constexpr double kProbeAgreement = 0.02;

// Reads the pieces in order, and the prompt behind them; logits are there afterwards. Without a prompt and a piece of
// tokens at the end, the last token is read again. On error the sequence's tokens are what they were, and *failed is the
// piece whose context can't be used, or pieces.size() if it was something else. Errors: Sequence::Splice's and Forward's.
Result<Assembled> Assemble(Sequence& sequence, std::span<const ContextPiece> pieces, std::span<const Token> prompt,
                           size_t* failed);

}  // namespace qkv
