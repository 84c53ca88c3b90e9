// The versions beside this one, from versions.json (docs/build.py). Without it
// (a build opened from a disk, or a single version) nothing is shown.
document.addEventListener("DOMContentLoaded", async () => {
  const place = document.querySelector(".versions");
  if (!place) return;
  try {
    const versions = await (await fetch(place.dataset.root + "../versions.json")).json();
    if (versions.length < 2) return;
    const select = document.createElement("select");
    for (const version of versions) {
      select.add(new Option(version, version, false, version === place.dataset.version));
    }
    select.addEventListener("change", () => {
      location.href = place.dataset.root + "../" + select.value + "/docs/index.html";
    });
    place.replaceChildren("Version ", select);
  } catch (error) {
    place.hidden = true;
  }
});
