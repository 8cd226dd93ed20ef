// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#pragma once

// The worker's side of agent_protocol.h: the whole life of the process behind the hidden subcommand `agent-worker`.

namespace qkv {

// Reads the set-up, loads the model, says ready, then prepares and takes turns, one after the other, until the runner hangs
// up. Returns the exit status: 0, or 1 when it could not be set up or was told what it does not understand. To be called
// once, in a process of its own: it asks the kernel to be killed when the thread that started it ends, and if `out_fd` is stdout
// it takes that over, so that nothing a library prints gets among the events.
int RunAgentWorker(int in_fd, int out_fd);

}  // namespace qkv
