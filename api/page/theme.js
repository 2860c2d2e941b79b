// Light, dark, or as the system has it. A plain script: it runs before anything is painted.
"use strict";
{
  const names = ["auto", "light", "dark"];
  const root = document.documentElement;
  const stored = () => {
    try {
      return localStorage.getItem("carpool.theme");
    } catch {
      return null; // storage is forbidden here: the choice lasts as long as the page
    }
  };
  let theme = names.includes(stored()) ? stored() : "auto";

  const show = () => {
    if (theme === "auto") delete root.dataset.theme;
    else root.dataset.theme = theme;
    const button = document.getElementById("theme-button");
    if (button) button.lastElementChild.textContent = theme;
  };

  show();
  document.addEventListener("DOMContentLoaded", () => {
    show();
    document.getElementById("theme-button").addEventListener("click", () => {
      theme = names[(names.indexOf(theme) + 1) % names.length];
      try {
        localStorage.setItem("carpool.theme", theme);
      } catch {
        // as above
      }
      show();
    });
  });
}
