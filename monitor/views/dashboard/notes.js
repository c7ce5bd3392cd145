// Draws people's notes on verdicts, and the buttons that mute and acknowledge.
import { clock, make } from "./format.js";

const TIMES = [
  ["30 minutes", 1800],
  ["2 hours", 7200],
  ["1 day", 86400],
  ["1 week", 604800],
];

let send = null;
// The note that is being written: the panel is drawn anew whenever a verdict changes.
let draft = null;

// Sets the function that posts a note; it returns what failed, or an empty text.
export function sendNotesBy(post) {
  send = post;
}

export function noteText(note) {
  const until = note.until_s ? ` until ${new Date(note.until_s * 1000).toLocaleString()}` : "";
  const kind = note.kind[0].toUpperCase() + note.kind.slice(1);
  return `${kind} by ${note.by} at ${clock(note.at_s)}${until}: ${note.reason}`;
}

function button(text, act) {
  const made = make("button", { type: "button" }, text);
  made.addEventListener("click", act);
  return made;
}

function questions(kind, post) {
  const isMute = kind === "muted";
  const by = make("input", { placeholder: "your name", required: "", maxlength: "80" });
  by.value = localStorage.getItem("keepstep-name") || "";
  by.addEventListener("input", () => localStorage.setItem("keepstep-name", by.value));
  const reason = make("input", {
    placeholder: isMute ? "why" : "what you do about it",
    required: "",
    maxlength: "300",
    class: "reason",
  });
  reason.value = draft.reason;
  reason.addEventListener("input", () => {
    draft.reason = reason.value;
  });
  const times = TIMES.map(([name, value]) => make("option", { value: `${value}` }, name));
  const time = make("select", { "aria-label": "for how long" }, ...times);
  time.value = draft.time;
  time.addEventListener("change", () => {
    draft.time = time.value;
  });
  const submit = make("button", { type: "submit" }, isMute ? "Mute" : "Acknowledge");
  const form = make("form", {}, by, reason, isMute ? time : null, submit);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const for_s = isMute ? Number(time.value) : 0;
    post({ kind, by: by.value, reason: reason.value, for_s });
  });
  return form;
}

// Returns the buttons of a verdict; what they ask for opens beneath them.
export function noteForm(number, note) {
  const box = make("div", { class: "noting" });
  const failed = make("span", { class: "failed", role: "alert" });
  const post = async (body) => {
    failed.textContent = await send(number, body);
    if (!failed.textContent) {
      draft = null;
      box.querySelector("form")?.remove();
    }
  };
  const open = (kind) => () => {
    draft = { number, kind, reason: draft?.reason || "", time: "1800" };
    box.querySelector("form")?.remove();
    box.append(questions(kind, post));
    box.querySelector("input").focus();
  };
  if (note)
    box.append(
      button(note.kind === "muted" ? "unmute" : "take back", () => post({ kind: null })),
    );
  if (note?.kind !== "muted") box.append(button("mute …", open("muted")));
  if (!note) box.append(button("acknowledge …", open("acknowledged")));
  box.append(failed);
  if (draft?.number === number) box.append(questions(draft.kind, post));
  return box;
}
