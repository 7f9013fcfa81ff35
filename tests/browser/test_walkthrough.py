"""A user's way through the dashboard, in a real browser, up to the downloaded file's own outputs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from playwright.sync_api import Locator, Page, expect

import psm_core as psm
from tests.browser.conftest import ROOT, App

NETWORK = "demo:fashion-mlp"
RELOAD = """
import sys, numpy, torch, psm_core as psm
model = psm.load_checkpoint(sys.argv[1])
images = psm.load_data("demo:test")
with torch.inference_mode():
    outputs = torch.cat([model(inputs) for inputs, _ in images.batches(250)])
numpy.savez(sys.argv[2], outputs=outputs, accuracy=psm.evaluate(model).accuracy)
"""


def settled(page: Page, heading: str) -> None:
    """Wait until this page is drawn and its script rests; nothing on it may be a traceback."""
    expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
    expect(page.get_by_test_id("stApp")).to_have_attribute("data-test-script-state", "notRunning")
    expect(page.locator(".stException")).to_have_count(0)


def click(page: Page, button: str | re.Pattern[str]) -> None:
    """Press the button of this name."""
    page.get_by_role("button", name=button, exact=isinstance(button, str)).click()


def open_page(page: Page, name: str) -> None:
    """Go to a page by the sidebar."""
    page.get_by_role("link", name=name, exact=True).click()
    settled(page, name)


def switch_off(pills: Locator, *labels: str) -> None:
    """Take these out of a group of chosen pills."""
    for label in labels:
        pill = pills.get_by_role("button", name=label, exact=True)
        expect(pill).to_have_attribute("aria-pressed", "true")
        pill.click()
        expect(pill).to_have_attribute("aria-pressed", "false")


def points(page: Page) -> Locator:
    """The marks drawn in the charts of the page."""
    return page.locator(".js-plotly-plot .scatterlayer .point")


def reload(file: Path) -> Mapping[str, np.ndarray]:
    """Outputs on all test images, and the accuracy, as a fresh Python process computes them."""
    results = file.with_suffix(".npz")
    subprocess.run(
        [sys.executable, "-c", RELOAD, str(file), str(results)],
        cwd=file.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    )
    return dict(np.load(results))


def test_addresses_open_their_pages_also_first_on_a_fresh_server(page: Page, app: App) -> None:
    for name in ("Compare", "Factorize", "Export", "Model"):
        page.goto(f"{app.url}/{name.lower().removeprefix('model')}")
        settled(page, name)
        expect(page.get_by_role("link", name=name, exact=True)).to_be_visible()


def test_from_a_model_to_a_file_that_reloads(page: Page, app: App, tmp_path: Path) -> None:
    page.goto(app.url)
    settled(page, "Model")
    page.get_by_role("combobox", name="Network").click()
    page.get_by_role("option", name=NETWORK).click()
    expect(page.get_by_text("669,706", exact=True)).to_be_visible()
    settled(page, "Model")
    third_row = {"x": 16, "y": 35 * 3 + 17}
    page.get_by_test_id("stDataFrame").locator(".dvn-scroller").click(position=third_row)
    click(page, re.compile("Factorize 1 layer"))

    settled(page, "Factorize")
    switch_off(page.get_by_test_id("stButtonGroup"), "SVD", "Tensor train", "Tucker")
    click(page, "Factorize: 2 fits")
    expect(page.get_by_text("Done: 2 results computed")).to_be_visible()
    settled(page, "Factorize")
    store = psm.ResultStore(app.cache)
    assert sorted(store.query(layer="fc3")["method"]) == ["prune", "psm"]
    expect(points(page)).to_have_count(2)
    click(page, "See all results on the Compare page")

    settled(page, "Compare")
    expect(points(page)).to_have_count(2)
    page.get_by_text("Run a sweep").click()
    form = page.get_by_test_id("stForm")
    switch_off(form.get_by_test_id("stButtonGroup").nth(0), "PSM", "Tensor train", "Tucker")
    switch_off(form.get_by_test_id("stButtonGroup").nth(1), "2 %", "5 %", "20 %")
    form.get_by_role("button", name="Clear all").click()
    click(page, "Run the sweep")
    expect(page.get_by_text("Done: 2 results computed, 1 answered from the cache")).to_be_visible()
    settled(page, "Compare")
    page.get_by_role("combobox", name="Show").click()
    page.get_by_role("option", name="Whole network").click()
    expect(points(page)).to_have_count(3)

    open_page(page, "Export")
    page.get_by_role("combobox", name=re.compile("^Result")).click()
    page.get_by_role("option", name=re.compile("^SVD")).click()
    settled(page, "Export")
    click(page, "Build and verify")
    expect(page.get_by_text("Verified in a fresh process")).to_be_visible()
    settled(page, "Export")
    metric = page.get_by_test_id("stMetric").filter(has_text="Accuracy")
    shown = metric.get_by_test_id("stMetricValue").inner_text()
    with page.expect_download() as download:
        click(page, re.compile("safetensors$"))
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)

    found = reload(file)
    dense = psm.load_model(NETWORK)
    small = psm.compress(dense, psm.uniform_plan(dense, "svd", 0.10).layers)
    expected = torch.cat([small(inputs) for inputs, _ in psm.load_data("demo:test").batches(250)])
    difference = np.abs(found["outputs"] - expected.detach().numpy()).max()
    assert difference <= 1e-5 * expected.abs().max()
    assert f"{found['accuracy']:.2%}" == shown.strip()
    assert file.stat().st_size < 0.2 * 4 * sum(p.numel() for p in dense.parameters())


def test_a_job_outlives_a_refresh_and_stops_when_cancelled(page: Page, app: App) -> None:
    page.goto(app.url)
    settled(page, "Model")
    click(page, "Compare the methods on this network")
    expect(points(page).first).to_be_visible()  # the first result, one click after arriving
    page.reload()
    settled(page, "Compare")
    expect(page.get_by_role("progressbar")).to_be_visible()
    click(page, "Cancel")
    expect(page.get_by_text(re.compile("Cancelled after .* what was finished is kept"))).to_be_visible()
