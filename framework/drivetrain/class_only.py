"""A class method that an object refuses: what makes a new object would be taken for one that changes this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain.errors import WrongKindError

if TYPE_CHECKING:
    class_only = classmethod
else:

    class class_only(classmethod):
        """``model.load_from_checkpoint(path)`` leaves ``model`` as it is, which nobody who writes so expects.

        Looking at the method is no call of it: TorchScript does so, and tools that list an object's members.
        """

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return super().__get__(instance, owner)
            name = self.__func__.__name__

            def refuse(*args: Any, **kwargs: Any) -> None:
                kind = type(instance).__name__
                raise WrongKindError(
                    f"{name} makes a new {kind} and leaves this one as it is: call it on the class, {kind}.{name}(...)."
                )

            return refuse
