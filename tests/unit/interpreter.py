"""Triton's CPU interpreter, faster: for the programs that run kernels under TRITON_INTERPRET=1."""


def patch_language_once() -> None:
    """Leave triton.language patched once it is: the interpreter searches it anew for each device function.

    That takes a third of the time of a kernel on a small tensor.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    patch, patched = interpreter._patch_lang, set()

    def patch_lang(function):
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if not modules <= patched:
            patch(function)
            patched.update(modules)
        return interpreter._LangPatchScope()  # nothing to restore

    interpreter._patch_lang = patch_lang
