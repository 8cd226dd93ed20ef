// SPDX-FileCopyrightText: 2026 The QKVShare authors
// SPDX-License-Identifier: Apache-2.0
#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "qkv/base/fd.h"
#include "qkv/cli/commands.h"

int main(int argc, char** argv) {
  CLI::App app{"QKVShare: agents hand over what they have read as the quantized KV cache itself."};
  app.name("qkvshare");
  app.set_version_flag("--version", "qkvshare " QKV_VERSION);
  app.require_subcommand(1);
  app.get_formatter()->column_width(34);
  app.footer(
      "Example: qkvshare run examples/writer_editor.yaml --compare\n"
      "Every command explains itself: qkvshare COMMAND --help");

  // Every context takes a few descriptors; the usual soft limit of 1024 is for programs that use select().
  (void)qkv::RaiseDescriptorLimit();

  int status = 0;
  qkv::cli::AddRun(app, status);
  qkv::cli::AddPlan(app, status);
  qkv::cli::AddGenerate(app, status);
  qkv::cli::AddPublish(app, status);
  qkv::cli::AddAttach(app, status);
  qkv::cli::AddBroker(app, status);
  qkv::cli::AddLs(app, status);
  qkv::cli::AddTop(app, status);
  qkv::cli::AddInspect(app, status);
  qkv::cli::AddVerify(app, status);
  qkv::cli::AddRelease(app, status);
  qkv::cli::AddBench(app, status);
  qkv::cli::AddEval(app, status);
  qkv::cli::AddCalibrate(app, status);
  qkv::cli::AddAgentWorker(app, status);

  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& done) {  // --help, --version
    return app.exit(done);
  } catch (const CLI::ParseError& error) {
    // CLI11 says that a command is missing even if there is one that it doesn't know.
    const std::vector<std::string> unknown = app.remaining(/*recurse=*/true);
    const bool missing = dynamic_cast<const CLI::RequiredError*>(&error) != nullptr && !unknown.empty();
    const std::string what = missing ? "no such command or option: " + unknown.front() : error.what();
    std::fprintf(stderr, "qkvshare: %s\nTry 'qkvshare --help', or 'qkvshare COMMAND --help'.\n", what.c_str());
    return 2;
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "qkvshare: out of memory\n");
    return 1;
  }
  std::fflush(stdout);
  if (std::ferror(stdout) != 0 && status == 0) {
    std::fprintf(stderr, "qkvshare: could not write to standard output\n");
    return 1;
  }
  return status;
}
