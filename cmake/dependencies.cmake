# Every dependency comes from a package; nothing is vendored. scripts/setup.sh installs them.
find_package(PkgConfig REQUIRED)
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(yaml-cpp REQUIRED)
find_package(CLI11 REQUIRED)
find_package(Protobuf REQUIRED)
find_package(GTest REQUIRED)
find_package(benchmark REQUIRED)

# Header-only packages without a usable CMake config on every supported release.
find_path(QKV_EXPECTED_INCLUDE tl/expected.hpp REQUIRED)
add_library(qkv_expected INTERFACE)
target_include_directories(qkv_expected SYSTEM INTERFACE ${QKV_EXPECTED_INCLUDE})

pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
add_library(qkv_xxhash INTERFACE)
target_link_libraries(qkv_xxhash INTERFACE PkgConfig::XXHASH)

pkg_check_modules(SODIUM REQUIRED IMPORTED_TARGET libsodium)
add_library(qkv_sodium INTERFACE)
target_link_libraries(qkv_sodium INTERFACE PkgConfig::SODIUM)

pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
add_library(qkv_hwy INTERFACE)
target_link_libraries(qkv_hwy INTERFACE PkgConfig::HWY)

pkg_check_modules(PROMETHEUS REQUIRED IMPORTED_TARGET prometheus-cpp-pull prometheus-cpp-core)
add_library(qkv_prometheus INTERFACE)
target_link_libraries(qkv_prometheus INTERFACE PkgConfig::PROMETHEUS)

find_package(Eigen3 3.3 REQUIRED NO_MODULE)

find_path(QKV_RAPIDCHECK_INCLUDE rapidcheck.h REQUIRED)
find_library(QKV_RAPIDCHECK_LIBRARY rapidcheck REQUIRED)
add_library(qkv_rapidcheck INTERFACE)
target_include_directories(qkv_rapidcheck SYSTEM INTERFACE ${QKV_RAPIDCHECK_INCLUDE})
target_link_libraries(qkv_rapidcheck INTERFACE ${QKV_RAPIDCHECK_LIBRARY})

# ggml and libllama: built by scripts/setup.sh into the cache folder, or the system's own. The tests' model is there too.
execute_process(COMMAND bash ${CMAKE_SOURCE_DIR}/scripts/setup.sh --paths OUTPUT_VARIABLE paths COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCH "MODEL=([^\n]*)" _ "${paths}")
set(QKV_TEST_MODEL "${CMAKE_MATCH_1}")
if(NOT QKV_SYSTEM_LLAMA)
  if(NOT QKV_LLAMA_PREFIX)
    string(REGEX MATCH "LLAMA_PREFIX=([^\n]*)" _ "${paths}")
    set(QKV_LLAMA_PREFIX "${CMAKE_MATCH_1}")
  endif()
  if(NOT EXISTS "${QKV_LLAMA_PREFIX}/.complete")
    message(FATAL_ERROR "ggml and libllama are not in ${QKV_LLAMA_PREFIX}. Run scripts/setup.sh (make setup), "
                        "or configure with -DQKV_SYSTEM_LLAMA=ON to use installed packages.")
  endif()
  list(PREPEND CMAKE_PREFIX_PATH "${QKV_LLAMA_PREFIX}")
endif()
find_package(llama REQUIRED)

# Generated protobuf messages, one library.
file(GLOB QKV_PROTOS CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/proto/qkvshare/v1/*.proto)
add_library(qkv_proto STATIC ${QKV_PROTOS})
target_include_directories(qkv_proto SYSTEM PUBLIC ${CMAKE_BINARY_DIR}/proto)
target_compile_options(qkv_proto PRIVATE -w)
target_link_libraries(qkv_proto PUBLIC protobuf::libprotobuf)
file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/proto)
protobuf_generate(TARGET qkv_proto IMPORT_DIRS ${CMAKE_SOURCE_DIR}/proto PROTOC_OUT_DIR ${CMAKE_BINARY_DIR}/proto)
