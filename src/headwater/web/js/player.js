// Recordings in the browser: decoding, 16 kHz samples for the server, and playback from any time.
// @ts-check

export const RATE = 16000;
const MAX_SECONDS = 30;

/** The first 30 seconds of a file, mono, at 16 kHz. @param {ArrayBuffer} bytes @returns {Promise<AudioBuffer>} */
export async function decodeRecording(bytes) {
  const decoded = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(bytes); // resampled to the rate of the context
  const length = Math.min(decoded.length, MAX_SECONDS * RATE);
  const mono = new AudioBuffer({ length, sampleRate: RATE, numberOfChannels: 1 });
  const mean = mono.getChannelData(0);
  for (let channel = 0; channel < decoded.numberOfChannels; channel++) {
    const samples = decoded.getChannelData(channel);
    for (let n = 0; n < length; n++) mean[n] += samples[n] / decoded.numberOfChannels;
  }
  return mono;
}

/** Samples as 16-bit integers in base64. @param {AudioBuffer} recording */
export function toBase64(recording) {
  const samples = recording.getChannelData(0);
  const view = new DataView(new ArrayBuffer(2 * samples.length));
  samples.forEach((sample, n) => view.setInt16(2 * n, Math.round(Math.max(-1, Math.min(1, sample)) * 32767), true));
  const bytes = new Uint8Array(view.buffer);
  let text = "";
  for (let n = 0; n < bytes.length; n += 8192) text += String.fromCharCode(...bytes.subarray(n, n + 8192));
  return btoa(text);
}

/** Bytes of base64. @param {string} text */
export function fromBase64(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}

/** Plays a recording from any time; onTick(seconds) while it plays, onStop() when it ends or is paused. */
export class Player {
  /** @param {AudioBuffer} recording @param {(seconds: number) => void} onTick @param {() => void} onStop */
  constructor(recording, onTick, onStop) {
    this.recording = recording;
    this.onTick = onTick;
    this.onStop = onStop;
    this.context = new AudioContext();
    this.offset = 0;
    this.startedAt = 0;
    /** @type {AudioBufferSourceNode | null} */
    this.source = null;
  }

  get playing() {
    return this.source !== null;
  }

  get seconds() {
    const elapsed = this.playing ? this.context.currentTime - this.startedAt : 0;
    return Math.min(this.offset + elapsed, this.recording.duration);
  }

  /** @param {number} [from] */
  async play(from = this.offset) {
    this.pause();
    await this.context.resume();
    this.offset = from >= this.recording.duration ? 0 : Math.max(0, from);
    const source = new AudioBufferSourceNode(this.context, { buffer: this.recording });
    source.connect(this.context.destination);
    source.onended = () => source === this.source && this.pause();
    source.start(0, this.offset);
    this.source = source;
    this.startedAt = this.context.currentTime;
    const tick = () => {
      if (source !== this.source) return;
      this.onTick(this.seconds);
      requestAnimationFrame(tick);
    };
    tick();
  }

  pause() {
    const source = this.source;
    if (!source) return;
    this.offset = this.seconds;
    this.source = null;
    source.stop();
    this.onTick(this.offset);
    this.onStop();
  }

  close() {
    this.pause();
    this.context.close();
  }
}
