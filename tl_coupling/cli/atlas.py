"""The command that draws a page of many saved maps: atlas."""

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import tl_coupling as tlc
from tl_coupling.cli.app import command
from tl_coupling.cli.console import work_in
from tl_coupling.files import write_atomically
from tl_coupling.studies.surveys import PLAN, UNITS

if TYPE_CHECKING:
    import xarray

# How values of 0 to 1 are saved: in 16 bits each, the largest for NaN.
_ENCODING = {
    "dtype": "uint16",
    "scale_factor": 1 / 65534,
    "_FillValue": 65535,
    "zlib": True,
}


@command
def atlas(
    maps: Annotated[
        list[Path],
        typer.Option(
            help="Folder with surveys or saved maps at any depth, or one netCDF file; "
            "may be repeated."
        ),
    ],
    k: Annotated[
        int | None,
        typer.Option(
            "--k",
            help="Top singular vectors that the small maps show. [10, or the nearest "
            "that was measured]",
            min=1,
        ),
    ] = None,
    save_means: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the mean map of each task, in 16 bits a value, which this "
            "command reads as well.",
            file_okay=False,
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="The page to write.", dir_okay=False)
    ] = Path("atlas.html"),
) -> None:
    """Write one page of the maps of many models, checkpoints and tasks.

    Small maps of all that surveys and saved maps hold, the mean over the prompts of each
    task, beside what random subspaces give. A reader chooses models, tasks, and trained
    or untrained weights; each small map opens to explore. The page is one file and needs
    no network. Nothing is measured: add maps of other models to the folder and run the
    command again.

    Examples:

      tl-coupling atlas --maps survey --out atlas.html

      tl-coupling atlas --maps survey --maps more/maps --k 30 --save-means means --out
      atlas.html
    """
    with work_in(out.parent) as work:
        with work.console.stage("reading maps …"):
            named_maps = _named_maps(maps)
            view = tlc.interactive.show_atlas(list(named_maps.values()), k=k)
        if save_means is not None:
            save_means.mkdir(parents=True, exist_ok=True)
            for name, data in named_maps.items():
                path = save_means / f"{name}.nc"
                work.written.append(write_atomically(path, partial(_save, data)))
        work.written.append(view.save(out))
        work.shown.append(f"maps of {', '.join(named_maps)}")


def _save(data: "xarray.Dataset", path: Path) -> None:
    """Write maps by task, and no provenance: it names folders of this machine."""
    data = data.drop_attrs()
    data.to_netcdf(path, engine="netcdf4", encoding={"coupling": _ENCODING})


def _named_maps(paths: list[Path]) -> "dict[str, xarray.Dataset]":
    """Return the maps by task of all that is in the folders, by a name of each source."""
    named_maps: dict[str, xarray.Dataset] = {}
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"`--maps` {path}: there is no such file or folder")
        for source, data in _opened(path):
            name, n = source, 1
            while name in named_maps:
                n += 1
                name = f"{source}-{n}"
            named_maps[name] = data
    if not named_maps:
        raise ValueError(
            f"`--maps` {', '.join(map(str, paths))}: no survey and no saved map is in "
            "there; `tl-coupling survey` and `CouplingMap.save` write some"
        )
    return named_maps


def _opened(path: Path) -> "Iterator[tuple[str, xarray.Dataset]]":
    """Yield the name and the maps by task of each source in a folder, or of a file."""
    if path.is_file():
        if (data := _opened_file(path)) is not None:
            yield path.stem, data
    elif (path / PLAN).exists():
        # A command writes its survey to a folder of one name.
        name = path.resolve().parent.name if path.name == UNITS else path.name
        try:
            data = tlc.open_survey(path)
        except ValueError as error:
            # Such as a survey that was begun just now: the others are shown.
            warnings.warn(f"left out: {error}", stacklevel=2)
        else:
            yield name, tlc.generalization.task_maps(data)
    else:
        for inner in sorted(path.iterdir()):
            if inner.is_dir() or inner.suffix == ".nc":
                yield from _opened(inner)


def _opened_file(path: Path) -> "xarray.Dataset | None":
    """Return the maps of a file; None, with a warning, where it holds another result."""
    import xarray

    try:
        data = xarray.load_dataset(path, engine="netcdf4")
    except OSError as error:
        raise OSError(
            f"{path} is not a netCDF file that can be read: {error}"
        ) from None
    kind = data.attrs.get("result", "")
    if kind.endswith("CouplingMap"):
        return tlc.generalization.task_maps(tlc.CouplingMap.load(path))
    if kind:
        warnings.warn(f"{path} is left out: a {kind}, no map", stacklevel=2)
        return None
    return tlc.generalization.task_maps(data)
