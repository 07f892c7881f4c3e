"""The objectives once more, in float64 NumPy and written for clarity: what `rl/losses.py` is compared with.

`theta` is differentiated; `frozen` is the same policy wherever the formula has a stop_gradient.
"""

import numpy as np


def means(values, segments):
    """Each token gets the mean of its sequence."""
    return np.array([values[segments == s].mean() for s in segments])


def m2po_kept(theta, b, a, threshold):
    """Drop the largest squared log-ratio among the pushed tokens until the rest has a mean of at most the threshold."""
    log_r = theta - b
    pushed = [i for i in range(len(theta)) if (a[i] > 0 and log_r[i] > 0) or (a[i] < 0 and log_r[i] < 0)]
    left = sorted(pushed, key=lambda i: log_r[i] ** 2)
    while left and np.mean([log_r[i] ** 2 for i in left]) > threshold:
        left.pop()
    return np.array([i not in pushed or i in left for i in range(len(theta))])


def surrogate(ratio, a, low, high):
    return np.maximum(-ratio * a, -np.clip(ratio, 1 - low, 1 + high) * a)


def per_token(config, theta, frozen, b, p, a, d, segments):
    """float64 [n]: the loss of each token, weights and rejections applied."""
    if config.proximal == "loglinear":
        p = b + d / (d + 1) * (frozen - b)
    if config.proximal == "behaviour":
        p = b
    r, rho, r0 = np.exp(theta - b), np.exp(theta - p), np.exp(frozen - b)
    low, high = config.clip_low, config.clip_high
    match config.name:
        case "ppo":
            loss = surrogate(r, a, low, high)
        case "decoupled_ppo":
            loss = surrogate(rho, a, low, high)
        case "staleness_ppo":
            age = {"token": d, "sequence": means(d, segments), "batch": np.full(len(d), d.mean())}
            scale = np.maximum(config.staleness_floor, config.staleness_decay ** age[config.staleness_scope])
            ratio = r if config.staleness_base == "ppo" else rho
            loss = surrogate(ratio, a, low * scale, high * scale)
        case "gspo":
            ratio = np.exp(theta - frozen + means(frozen - b, segments))
            loss = surrogate(ratio, a, config.gspo_clip_low, config.gspo_clip_high)
        case "cispo":
            loss = -np.clip(r0, config.cispo_low, config.cispo_high) * a * theta
        case "sapo":
            tau = np.where(a > 0, config.sapo_positive, config.sapo_negative)
            loss = -4 / tau / (1 + np.exp(-tau * (r - 1))) * a
        case "m2po":
            loss = m2po_kept(frozen, b, a, config.m2po_threshold) * -r * a
        case "topr":
            total = np.array([(frozen - b)[segments == s].sum() for s in segments])
            loss = -np.where(a < 0, np.minimum(1, np.exp(total)), 1) * a * theta
        case "dppo":
            moved = np.exp(frozen) - np.exp(b)
            kept = ~((a > 0) & (moved > config.dppo_threshold)) & ~((a < 0) & (moved < -config.dppo_threshold))
            loss = kept * -r * a + config.dppo_penalty * (theta - b) ** 2
        case "reinforce":
            loss = -a * theta
    if config.dual_clip:
        loss = np.where(a < 0, np.minimum(loss, -config.dual_clip * a), loss)
    w = np.exp(means(p - b, segments) if config.importance_level == "sequence" else p - b)
    if config.importance_weight == "clamp":
        loss = np.minimum(w, config.importance_cap) * loss
    if config.importance_weight == "mask":
        loss = w * ((w >= config.importance_low) & (w <= config.importance_cap)) * loss
    if config.opsm_threshold:
        loss = loss * ~((a < 0) & (means(b - frozen, segments) > config.opsm_threshold))
    return loss


def gradient(config, theta, *rest):
    """d(sum of the losses) / d theta by central differences, theta's stop_gradients held."""
    h, out = 1e-6, []
    for i in range(len(theta)):
        step = h * (np.arange(len(theta)) == i)
        up = per_token(config, theta + step, theta, *rest).sum()
        down = per_token(config, theta - step, theta, *rest).sum()
        out.append((up - down) / (2 * h))
    return np.array(out)
