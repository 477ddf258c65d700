"""Skip steps of Triton's interpreter that change no result and take most of its time."""

import dataclasses
import functools


def speed_up_interpreter():
    """Make interpreted kernels two to three times as fast, for the rest of this process.

    If this version of Triton lacks a function to replace, its interpreter is left unchanged.
    """
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    needed = ("_patch_lang", "_LangPatchScope", "_get_np_dtype", "interpreter_builder")
    if not all(hasattr(interpreter, name) for name in needed):
        return

    # The interpreter patches all of `triton.language` at each call of a kernel, or of a function in
    # one. Once per module is enough.
    patch_lang = interpreter._patch_lang
    patched = set()

    @functools.wraps(patch_lang)
    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patch_lang(fn)
            patched.add(id(fn.__globals__))
        return interpreter._LangPatchScope()  # nothing to restore: this process compiles no kernel

    interpreter._patch_lang = patch_once

    # Each sum of integers is repeated in int64 to detect overflow. But an overflow is only reported
    # if `debug` is on.
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # Each lookup of a dtype builds a table of all dtypes: keep the results.
    look_up = interpreter._get_np_dtype
    by_name = {}

    @functools.wraps(look_up)
    def look_up_once(dtype):
        if dtype.name not in by_name:
            by_name[dtype.name] = look_up(dtype)
        return by_name[dtype.name]

    interpreter._get_np_dtype = look_up_once
    _build_types_once(interpreter.tl.core)


def _build_types_once(core):
    """Keep the types of blocks and the shapes of tensors, which each operation builds again."""
    build_block, build_tensor = core.block_type.__init__, core.tensor.__init__
    blocks, scalars = {}, {}

    @functools.wraps(build_block)
    def build_block_once(self, element_ty, shape):
        sizes = (getattr(size, "value", size) for size in shape)
        key = str(element_ty), getattr(element_ty, "address_space", None), *sizes
        if key not in blocks:
            build_block(self, element_ty, shape)
            blocks[key] = vars(self) | {"tensor_attributes": {}}
        vars(self).update(blocks[key])

    @functools.wraps(build_tensor)
    def build_tensor_once(self, handle, type):
        known = vars(type).get("tensor_attributes", {}) if type.is_block() else scalars
        if known:
            vars(self).update(known, handle=handle, type=type, dtype=type.scalar)
        else:
            build_tensor(self, handle, type)
            known.update(shape=self.shape, numel=self.numel)

    core.block_type.__init__, core.tensor.__init__ = build_block_once, build_tensor_once
