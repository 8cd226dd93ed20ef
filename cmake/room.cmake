# qkv_room(NAME [ROOMS room…] [LIBS target…] [MAIN program])
#
# Makes the static library qkv_NAME from qkv/NAME/*.cc, and the test program NAME_test from qkv/NAME/*_test.cc.
# With MAIN, qkv/NAME/main.cc becomes a program of that name and is left out of the library.
function(qkv_room name)
  cmake_parse_arguments(ROOM "" "MAIN" "ROOMS;LIBS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/qkv/${name}/*.cc)
  set(tests ${sources})
  list(FILTER sources EXCLUDE REGEX "(_test|/main)\\.cc$")
  list(FILTER tests INCLUDE REGEX "_test\\.cc$")

  if(NOT sources)
    return()
  endif()
  add_library(qkv_${name} STATIC ${sources})
  target_include_directories(qkv_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  list(TRANSFORM ROOM_ROOMS PREPEND qkv_)
  target_link_libraries(qkv_${name} PUBLIC ${ROOM_ROOMS} ${ROOM_LIBS} Threads::Threads)
  set_target_properties(qkv_${name} PROPERTIES LINKER_LANGUAGE CXX)

  if(ROOM_MAIN)
    add_executable(${ROOM_MAIN} ${CMAKE_SOURCE_DIR}/qkv/${name}/main.cc)
    target_link_libraries(${ROOM_MAIN} PRIVATE qkv_${name})
    set_target_properties(${ROOM_MAIN} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR})
  endif()

  if(tests)
    add_executable(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE qkv_${name} qkv_rapidcheck GTest::gmock GTest::gtest_main)
    set_target_properties(${name}_test PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    include(GoogleTest)
    gtest_discover_tests(${name}_test TEST_PREFIX "${name}." PROPERTIES TIMEOUT 300 DISCOVERY_TIMEOUT 60)
  endif()
endfunction()
