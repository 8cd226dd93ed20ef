// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The agent's side of agent_protocol.h: the whole life of the process behind the hidden subcommand `agent-worker`.

namespace qkv {

// Reads the set-up, loads the model, says ready, takes one turn, then holds its context until the runner hangs up.
// Returns the exit status: 0, or 1 when it reported an error or the runner hung up early. To be called once, in a
// process of its own: it asks the kernel to be killed when the thread that started it ends, and if `out_fd` is stdout
// it takes that over, so that nothing a library prints gets among the events.
int RunAgentWorker(int in_fd, int out_fd);

}  // namespace qkv
