// The entry points of an instruction set; included last in its namespace.

template <class Arithmetic, class T> static void fill_rows(const Fill &fill) {
    const Array &logits = fill.logits;
    long inner = logits.shape[2], rows = logits.shape[0] * inner, words = words_of(fill.call.fields);
    for (long r = 0; r < rows; r++) {
        Weights weights = {fill.weight, {nullptr, 0, 0}, fill.kept, fill.share};
        if (fill.probabilities.data) weights.probabilities = row_of(fill.probabilities, r / inner, r % inner);
        Line row = row_of(logits, r / inner, r % inner);
        long column = fill.columns ? long(fill.columns[r]) : -1;
        state_of<Arithmetic, T>(row, logits.shape[1], column, fill.first_class, weights, fill.call)
            .template store<Arithmetic>(fill.states + r * words, fill.call);
    }
}

static void fill(const Fill &fill) {
    if (fill.wide) return fill_rows<Double, double>(fill);
    switch (fill.logits.kind) {
        case FLOAT32:
            return fill_rows<Single, float>(fill);
        case FLOAT16:
            return fill_rows<Single, Half>(fill);
        default:
            return fill_rows<Single, BFloat>(fill);
    }
}

template <class Number> static void put(const Array &out, char *place, Number value) {
    switch (out.kind) {
        case FLOAT32: {
            float v = of_number<float>(value);
            memcpy(place, &v, sizeof v);
            break;
        }
        case FLOAT64: {
            double v = value;
            memcpy(place, &v, sizeof v);
            break;
        }
        case FLOAT16: {
            Half v = of_number<Half>(value);
            memcpy(place, &v, sizeof v);
            break;
        }
        default: {
            BFloat v = of_number<BFloat>(value);
            memcpy(place, &v, sizeof v);
            break;
        }
    }
}

template <class Arithmetic, class T> static void write_rows(const Write &write) {
    typedef typename Arithmetic::Number Number;
    const Array &logits = write.logits, &out = write.out;
    const Transform &transform = write.call.transform;
    long classes = logits.shape[1], inner = logits.shape[2], rows = logits.shape[0] * inner;
    bool direct = out.kind == kind_of<T>() && out.strides[1] == long(sizeof(T));
    T buffer[CHUNK], result[CHUNK];
    for (long r = 0; r < rows; r++) {
        const RowGradient &gradient = write.rows[r];
        Line from = row_of(logits, r / inner, r % inner);
        char *to = out.data + r / inner * out.strides[0] + r % inner * out.strides[2];
        Weights weights = {write.weight, {nullptr, 0, 0}, write.kept, write.share};
        if (write.probabilities.data) weights.probabilities = row_of(write.probabilities, r / inner, r % inner);
        RowFactor row = RowFactor::of(gradient, transform);
        for (long first = 0, count; first < classes; first += count) {
            count = classes - first < CHUNK ? classes - first : long(CHUNK);
            char *place = to + first * out.strides[1];
            if (!gradient.valid) {
                for (long i = 0; i < count; i++) put(out, place + i * out.strides[1], Number(0));
                continue;
            }
            const T *x = chunk_of(from, first, count, buffer);
            // The gradient may be written over the logits, so the classes held are found before.
            uint16_t held[CHUNK];
            long held_count = 0, column = gradient.column - first;
            if (write.probabilities.data) {
                for (long i = 0; i < count; i++)
                    if (number_of(x[i]) == gradient.held && weights.at(first + i) == gradient.held_weight)
                        held[held_count++] = uint16_t(i);
            } else if (column >= 0 && column < count) {
                held[held_count++] = uint16_t(column);
            }
            double logit = held_count ? number_of(x[held[0]]) : 0.0;
            write_chunk<Arithmetic>(x, direct ? (T *)place : result, count, first, weights, row, gradient.most,
                                    write.call);
            if (!direct)
                for (long i = 0; i < count; i++) put(out, place + i * out.strides[1], number_of(result[i]));
            double slope = transform.softcap != 0.0 && held_count ? softcap_slope(logit, transform) : 1.0;
            Number value = Number(gradient.held_gradient * slope);
            for (long i = 0; i < held_count; i++)
                put(out, place + held[i] * out.strides[1], value == value ? value : Number(not_a_number()));
        }
    }
}

static void write(const Write &write) {
    if (write.wide) return write_rows<Double, double>(write);
    // A gradient that is no array of the logits' dtype is rounded to it by way of float32.
    if (write.out.kind != write.logits.kind) return write_rows<Single, float>(write);
    switch (write.logits.kind) {
        case FLOAT32:
            return write_rows<Single, float>(write);
        case FLOAT16:
            return write_rows<Single, Half>(write);
        default:
            return write_rows<Single, BFloat>(write);
    }
}

static const Loops LOOPS = {fill, write};
