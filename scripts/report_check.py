"""Makes small runs, reports them, and looks at the pages in a headless browser without a network.

    python scripts/report_check.py            # two minutes on one core
    python scripts/report_check.py --reuse    # pages of the runs that are there already

Checks that nothing is said on the console, that every chart is drawn at a real size, that links inside of the page lead
somewhere, and that nothing is wider than the window, on a desk and on a phone, in light and in dark. Writes screenshots
into the folder of pictures of the documentation. The last line sums it up.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from autoprec import AutoPrecisionCallback, AutoPrecisionConfig, ClipConfig, LossScaleConfig, RuleConfig
from autoprec.report import Prices, build, write_html

ROOT = Path(__file__).resolve().parents[1]
TARGET = "autoprec.demo.targets:cnn"
LARGEST_PNG = 300_000
VIEWS: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 900}},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "is_mobile": True, "has_touch": True},
}
LOOK = """() => {
  const plots = [...document.querySelectorAll(".plot")];
  const drawn = plots.filter((plot) => {
    const svg = plot.querySelector("svg.main-svg");
    const box = svg && svg.getBoundingClientRect();
    const marks = plot.querySelectorAll(".trace, .heatmaplayer image, .point").length;
    return box && box.width > 150 && box.height > 100 && marks > 0;
  });
  const links = [...document.querySelectorAll('a[href^="#"]')].map((link) => link.getAttribute("href").slice(1));
  return {
    charts: plots.length, drawn: drawn.length, links: links.length,
    lost: links.filter((name) => !document.getElementById(name)),
    outside: [...document.querySelectorAll("[src], link[href]")].map((each) => each.src || each.href)
      .filter((address) => !address.startsWith("data:")),
    overflow: document.documentElement.scrollWidth - window.innerWidth,
  };
}"""


class Classifier(pl.LightningModule):
    """Six layers, the fourth of which gets inputs that leave the range of fp16 for a while."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU())
        self.body = nn.Sequential(nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 96))
        self.head = nn.Linear(96, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.stem(x)
        if 150 <= self.global_step < 153:
            hidden = hidden * 3e5
        loss = nn.functional.cross_entropy(self.head(self.body(hidden)), y)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=400)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def overflowing_run(folder: Path) -> None:
    """A run that overflows, so that the guard raises a layer."""
    pl.seed_everything(0)
    x = torch.randn(2048, 32)
    data = TensorDataset(x, (x @ torch.randn(32, 8)).argmax(1))
    config = AutoPrecisionConfig(
        formats=("fp32", "bf16", "fp16"),
        rule=RuleConfig(stable_cv=10.0, stages=2),
        loss_scale=LossScaleConfig(init_scale=2.0**13, growth_interval=60),
        clip=ClipConfig(min_norms=8),
    )
    callback = AutoPrecisionCallback(interval=10, config=config, record=folder, verbose=False)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = pl.Trainer(
        max_steps=400,
        max_epochs=-1,
        accelerator="cpu",
        devices=1,
        callbacks=[callback],
        plugins=MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**13)),
        **quiet,  # type: ignore[arg-type]
    )
    trainer.fit(Classifier(), DataLoader(data, batch_size=32, shuffle=True))


def comparison(folder: Path) -> None:
    """A small comparison with its own command."""
    words = [TARGET, "--arms", "32-true,bf16-mixed,autoprec", "--seeds", "3", "--interval", "8", "--minutes", "1"]
    command = [sys.executable, "-m", "autoprec", "compare", *words, "--out", str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


@dataclass
class Found:
    """What the browser has seen."""

    charts: int = 0
    console: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def look(page_file: Path, pictures: Path, name: str, browser: str) -> Found:
    """Opens a page in every view and takes pictures of it.

    Args:
        page_file: The page.
        pictures: Folder for pictures.
        name: Begins their names.
        browser: The browser's program.
    """
    from playwright.sync_api import sync_playwright

    found = Found()
    pictures.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        for view, options in VIEWS.items():
            context = chromium.new_context(offline=True, **options)
            page = context.new_page()
            page.on("console", lambda message: found.console.append(f"{message.type}: {message.text}"))
            page.on("pageerror", lambda error: found.console.append(f"error: {error}"))
            page.on("requestfailed", lambda request: found.faults.append(f"asked for {request.url}"))
            page.goto(page_file.resolve().as_uri())
            page.wait_for_timeout(300)
            seen = page.evaluate(LOOK)
            found.charts = seen["charts"]
            found.faults += [f"{name}, {view}: {fault}" for fault in faults(seen)]
            for number, anchor in enumerate(("h1", "section:nth-of-type(3)")):
                page.locator(anchor).first.scroll_into_view_if_needed()
                page.evaluate(f"document.querySelector({anchor!r}).scrollIntoView({{behavior: 'instant'}})")
                page.wait_for_timeout(150)
                path = pictures / f"report-{name}-{view}-{number + 1}.png"
                page.screenshot(path=path)
                if path.stat().st_size > LARGEST_PNG:
                    found.faults.append(f"{path} has {path.stat().st_size} bytes")
            context.close()
        chromium.close()
    return found


def faults(seen: dict[str, Any]) -> Iterator[str]:
    """Yields what is wrong with a page.

    Args:
        seen: What ``LOOK`` returned.
    """
    if not seen["charts"] or seen["drawn"] != seen["charts"]:
        yield f"{seen['drawn']} of {seen['charts']} charts are drawn"
    if not seen["links"] or seen["lost"]:
        yield f"links that lead nowhere: {seen['lost']} of {seen['links']}"
    if seen["outside"]:
        yield f"asks for {seen['outside']}"
    if seen["overflow"] > 0:
        yield f"is {seen['overflow']} pixels wider than the window"


def main() -> int:
    """Returns 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "report-check", help="folder for runs and pages")
    parser.add_argument("--images", type=Path, default=ROOT / "docs" / "images", help="folder for screenshots")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("google-chrome"))
    parser.add_argument("--reuse", action="store_true", help="use the runs that an earlier check has made")
    options = parser.parse_args()
    if options.browser is None:
        print("report-check needs chromium: `apt-get install chromium`, or pass --browser.", file=sys.stderr)
        return 2
    run, compared = options.out / "run", options.out / "comparison"
    if not (options.reuse and run.exists() and compared.exists()):
        shutil.rmtree(options.out, ignore_errors=True)
        overflowing_run(run)
        comparison(compared)
    prices = Prices(per_hour=2.5, energy=0.3, currency="EUR")
    pages = {"comparison": [compared], "run": [run], "both": [compared, run]}
    charts, size, console, wrong = 0, 0, [], []
    for name, folders in pages.items():
        page = write_html(build(folders, prices=prices), options.out / f"{name}.html")
        pictures = options.images if name != "both" else options.out / "images"
        found = look(page, pictures, name, options.browser)
        charts, size = charts + found.charts, max(size, page.stat().st_size)
        console += found.console
        wrong += found.faults
    for line in (*console, *wrong):
        print(line)
    print(f"report: charts={charts} console_errors={len(console)} bytes={size}")
    return 1 if console or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
