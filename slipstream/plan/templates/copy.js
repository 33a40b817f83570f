"use strict";
// A button copies the text of the block before it.
document.querySelectorAll("button.copy").forEach((button) => {
  const text = button.previousElementSibling.textContent;
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(button.previousElementSibling);
      button.textContent = "Selected";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });
});
