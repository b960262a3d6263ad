# Where NVTX's header lies, which needs no CUDA: in the wheel nvidia-nvtx, else in a CUDA toolkit.
# Sets NVTX_INCLUDE_DIR, or leaves it false. Not cached, because pip's build environments pass away.
set(PYKERN_FIND_WHEELS [[
import glob, importlib.util
spec = importlib.util.find_spec("nvidia")
roots = [] if spec is None else spec.submodule_search_locations
found = [path for root in roots for path in sorted(glob.glob(f"{root}/*/include"), reverse=True)]
print(";".join(found))
]])
foreach(interpreter IN ITEMS "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  if(EXISTS "${interpreter}")
    execute_process(COMMAND "${interpreter}" -c "${PYKERN_FIND_WHEELS}"
                    OUTPUT_VARIABLE wheels OUTPUT_STRIP_TRAILING_WHITESPACE)
    list(APPEND PYKERN_NVTX_HINTS ${wheels})
  endif()
endforeach()
find_path(NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h NO_CACHE
          HINTS ${PYKERN_NVTX_HINTS} ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
