// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include "qkv/engine/vocab.h"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "qkv/engine/model_internal.h"

namespace qkv {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD

// Length of the UTF-8 character that begins with this byte; 0 if none can.
size_t CharLength(unsigned char lead) {
  if (lead < 0x80) return 1;
  if (lead >= 0xC2 && lead <= 0xDF) return 2;
  if (lead >= 0xE0 && lead <= 0xEF) return 3;
  if (lead >= 0xF0 && lead <= 0xF4) return 4;
  return 0;
}

// Whether `byte` may be the one at `index` >= 1 of a character that begins with `lead` (Unicode 15, table 3-7).
bool Continues(unsigned char lead, size_t index, unsigned char byte) {
  if (index == 1) {
    if (lead == 0xE0) return byte >= 0xA0 && byte <= 0xBF;
    if (lead == 0xED) return byte >= 0x80 && byte <= 0x9F;
    if (lead == 0xF0) return byte >= 0x90 && byte <= 0xBF;
    if (lead == 0xF4) return byte >= 0x80 && byte <= 0x8F;
  }
  return byte >= 0x80 && byte <= 0xBF;
}

// Moves complete characters from `bytes` to the result; what may still become one stays.
std::string TakeComplete(std::string& bytes) {
  std::string out;
  size_t i = 0;
  while (i < bytes.size()) {
    const auto lead = static_cast<unsigned char>(bytes[i]);
    const size_t length = CharLength(lead);
    size_t have = length == 0 ? 0 : 1;
    while (have > 0 && have < length && i + have < bytes.size() &&
           Continues(lead, have, static_cast<unsigned char>(bytes[i + have]))) {
      ++have;
    }
    if (have == length && length > 0) {
      out.append(bytes, i, length);
      i += length;
    } else if (have > 0 && i + have == bytes.size()) {
      break;  // the rest may follow with the next token
    } else {
      out += kReplacement;
      i += std::max<size_t>(have, 1);
    }
  }
  bytes.erase(0, i);
  return out;
}

// Stand for message contents while a template is applied; no template changes plain letters.
constexpr std::string_view kSystemMark = "QKVSHARESYSTEMMESSAGE";
constexpr std::string_view kUserMark = "QKVSHAREUSERMESSAGE";
constexpr std::string_view kAssistantMark = "QKVSHAREASSISTANTMESSAGE";

Result<std::string> ApplyTemplate(const std::string& chat_template, std::span<const llama_chat_message> messages,
                                  bool add_assistant) {
  std::string text(4096, '\0');
  for (;;) {
    const int32_t n = llama_chat_apply_template(chat_template.c_str(), messages.data(), messages.size(), add_assistant,
                                                text.data(), static_cast<int32_t>(text.size()));
    if (n < 0) return Err(Code::kIncompatible, "libllama does not know the model's chat template");
    const bool fits = static_cast<size_t>(n) <= text.size();
    text.resize(n);
    if (fits) return text;
  }
}

// A piece of a formatted conversation: the template's own text, or a message that must not be read as control tokens.
struct Piece {
  std::string text;
  bool from_template;
};

// Replaces marks by the messages they stand for.
std::vector<Piece> FillIn(std::string_view formatted,
                          std::span<const std::pair<std::string_view, std::string_view>> messages) {
  std::vector<Piece> pieces;
  for (const auto& [mark, message] : messages) {
    const size_t at = formatted.find(mark);
    if (at == std::string_view::npos) continue;
    pieces.push_back({std::string(formatted.substr(0, at)), true});
    pieces.push_back({std::string(message), false});
    formatted.remove_prefix(at + mark.size());
  }
  pieces.push_back({std::string(formatted), true});
  return pieces;
}

// In one go when that cannot turn a message's text into control tokens (it tokenizes as the model was trained to see it),
// else piece by piece.
Result<std::vector<Token>> TokenizePieces(const Vocab& vocab, std::span<const Piece> pieces, bool add_bos) {
  std::string whole;
  bool clean = true;
  for (const Piece& piece : pieces) {
    whole += piece.text;
    if (piece.from_template) continue;
    QKV_ASSIGN_OR_RETURN(const auto plain, vocab.Tokenize(piece.text, false, false));
    QKV_ASSIGN_OR_RETURN(const auto special, vocab.Tokenize(piece.text, false, true));
    clean = clean && plain == special;
  }
  if (clean) return vocab.Tokenize(whole, add_bos, true);
  std::vector<Token> tokens;
  for (const Piece& piece : pieces) {
    if (piece.text.empty()) continue;
    QKV_ASSIGN_OR_RETURN(const auto part, vocab.Tokenize(piece.text, add_bos && tokens.empty(), piece.from_template));
    tokens.insert(tokens.end(), part.begin(), part.end());
  }
  return tokens;
}

}  // namespace

Vocab::Vocab(const Model& model) : model_(model) {}

bool Vocab::has_chat_template() const {
  return !model_.internal().chat_template.empty();
}

Result<std::vector<Token>> Vocab::Tokenize(std::string_view text, bool add_bos, bool with_special) const {
  if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max() / 2)) {
    return Err(Code::kInvalidArgument, Reason::kTooLong, "text of {} bytes is too long to tokenize", text.size());
  }
  std::vector<Token> tokens(text.size() + 8);
  const auto run = [&]() -> Result<int32_t> {
    try {
      return llama_tokenize(model_.internal().vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                            static_cast<int32_t>(tokens.size()), add_bos, with_special);
    } catch (const std::invalid_argument& e) {  // bytes that would be a code point beyond U+10FFFF
      return Err(Code::kInvalidArgument, "the text is not UTF-8: {}", e.what());
    }
  };
  QKV_ASSIGN_OR_RETURN(int32_t n, run());
  if (n < 0) {
    tokens.resize(static_cast<size_t>(-int64_t{n}));
    QKV_ASSIGN_OR_RETURN(n, run());
  }
  if (n < 0) return Err(Code::kInternal, "libllama could not tokenize {} bytes", text.size());
  tokens.resize(n);
  return tokens;
}

std::string Vocab::Piece(Token token) const {
  if (token < 0 || token >= llama_vocab_n_tokens(model_.internal().vocab)) return "";
  char buffer[64];
  const int32_t n = llama_token_to_piece(model_.internal().vocab, token, buffer, sizeof buffer, 0, false);
  if (n >= 0) return std::string(buffer, n);
  std::string piece(-n, '\0');
  llama_token_to_piece(model_.internal().vocab, token, piece.data(), -n, 0, false);
  return piece;
}

std::string Vocab::Text(std::span<const Token> tokens) const {
  TextStream stream(*this);
  std::string text;
  for (const Token token : tokens) text += stream.Push(token);
  return text + stream.Finish();
}

std::optional<Token> Vocab::BeginningOfText() const {
  const llama_token token = llama_vocab_bos(model_.internal().vocab);
  if (token == LLAMA_TOKEN_NULL) return std::nullopt;
  return token;
}

bool Vocab::IsEndOfGeneration(Token token) const {
  return llama_vocab_is_eog(model_.internal().vocab, token);
}

Result<std::vector<Token>> Vocab::FirstTurn(std::string_view system, std::string_view user) const {
  if (!has_chat_template()) {
    const std::string text = system.empty() ? std::string(user) : fmt::format("{}\n\n{}", system, user);
    return Tokenize(text, true, false);
  }
  std::vector<llama_chat_message> messages;
  if (!system.empty()) messages.push_back({"system", kSystemMark.data()});
  messages.push_back({"user", kUserMark.data()});
  QKV_ASSIGN_OR_RETURN(const std::string formatted, ApplyTemplate(model_.internal().chat_template, messages, true));
  const std::pair<std::string_view, std::string_view> contents[] = {{kSystemMark, system}, {kUserMark, user}};
  return TokenizePieces(*this, FillIn(formatted, contents), true);
}

Result<std::vector<Token>> Vocab::NextTurn(std::string_view user) const {
  if (!has_chat_template()) return Tokenize(fmt::format("\n\n{}", user), false, false);
  // What the template puts behind an assistant's message is the difference between the formatted conversation and its
  // beginning up to that message.
  const llama_chat_message messages[] = {
      {"user", "q"}, {"assistant", kAssistantMark.data()}, {"user", kUserMark.data()}};
  QKV_ASSIGN_OR_RETURN(const std::string formatted, ApplyTemplate(model_.internal().chat_template, messages, true));
  const size_t at = formatted.find(kAssistantMark);
  if (at == std::string::npos) return Err(Code::kIncompatible, "the model's chat template drops assistant messages");
  const std::pair<std::string_view, std::string_view> contents[] = {{kUserMark, user}};
  return TokenizePieces(*this, FillIn(std::string_view(formatted).substr(at + kAssistantMark.size()), contents), false);
}

Result<std::vector<Token>> Vocab::SystemTurn(std::string_view system) const {
  if (!has_chat_template()) return Tokenize(system, true, false);
  const llama_chat_message messages[] = {{"system", kSystemMark.data()}};
  QKV_ASSIGN_OR_RETURN(const std::string formatted, ApplyTemplate(model_.internal().chat_template, messages, false));
  if (formatted.find(kSystemMark) == std::string::npos) return std::vector<Token>{};
  const std::pair<std::string_view, std::string_view> contents[] = {{kSystemMark, system}};
  return TokenizePieces(*this, FillIn(formatted, contents), true);
}

std::string TextStream::Push(Token token) {
  pending_ += vocab_.Piece(token);
  return TakeComplete(pending_);
}

std::string TextStream::Finish() {
  std::string rest = TakeComplete(pending_);
  if (!pending_.empty()) rest += kReplacement;
  pending_.clear();
  return rest;
}

std::string Sampling::Describe() const {
  if (temperature <= 0) return "greedy";
  return fmt::format("temp={} top_k={} top_p={} min_p={} seed={}", temperature, top_k, top_p, min_p, seed);
}

struct Sampler::Impl {
  llama_sampler* chain;
  std::vector<llama_token_data> candidates;
  ~Impl() { llama_sampler_free(chain); }
};

Sampler::Sampler(const Sampling& sampling) : impl_(new Impl) {
  impl_->chain = llama_sampler_chain_init(llama_sampler_chain_default_params());
  const auto add = [this](llama_sampler* sampler) { llama_sampler_chain_add(impl_->chain, sampler); };
  if (sampling.temperature <= 0) {
    add(llama_sampler_init_greedy());
    return;
  }
  if (sampling.top_k > 0) add(llama_sampler_init_top_k(sampling.top_k));
  if (sampling.top_p < 1) add(llama_sampler_init_top_p(sampling.top_p, 1));
  if (sampling.min_p > 0) add(llama_sampler_init_min_p(sampling.min_p, 1));
  add(llama_sampler_init_temp(sampling.temperature));
  add(llama_sampler_init_dist(sampling.seed));
}
Sampler::~Sampler() = default;
Sampler::Sampler(Sampler&&) noexcept = default;

Token Sampler::Sample(std::span<const float> logits) {
  auto& candidates = impl_->candidates;
  candidates.resize(logits.size());
  for (size_t i = 0; i < logits.size(); ++i) candidates[i] = {static_cast<Token>(i), logits[i], 0.0f};
  llama_token_data_array array = {candidates.data(), candidates.size(), -1, false};
  llama_sampler_apply(impl_->chain, &array);
  const Token token = array.selected >= 0 ? array.data[array.selected].id : 0;
  llama_sampler_accept(impl_->chain, token);
  return token;
}

}  // namespace qkv
